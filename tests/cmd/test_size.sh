#!/usr/bin/env bash
# Folders of src/ stay within the lines that tests/budget.txt gives them, and every folder has a row there. Needs no binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
failed=0
say() { # condition sentence
    if [ "$1" -eq 0 ]; then echo "ok $2"; else echo "not ok $2" && failed=1; fi
}
lines_of() { find "src/$1" -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def' \) -exec cat {} + | wc -l; }

declare -A budget
while read -r folder lines _; do budget[$folder]=$lines; done < <(grep -vE '^(#|$)' tests/budget.txt)

missing=0
for path in src/*/; do
    folder=${path#src/} folder=${folder%/}
    [ -n "${budget[$folder]-}" ] || { echo "  src/$folder has $(lines_of "$folder") lines and no row in tests/budget.txt"; missing=1; }
done
say $missing "every folder has a budget"

stale=0 over=0 loose=0
for folder in "${!budget[@]}"; do
    [ -d "src/$folder" ] || { echo "  tests/budget.txt: there is no src/$folder"; stale=1; continue; }
    n=$(lines_of "$folder")
    [ "$n" -le "${budget[$folder]}" ] || {
        echo "  src/$folder has $n lines, its budget is ${budget[$folder]}: shorten it, or raise the row with the reason"
        over=1
    }
    # Room that nobody needs is no budget.
    [ $((n * 12 + 1000)) -ge $((budget[$folder] * 10)) ] || {
        echo "  src/$folder has $n lines, its budget is ${budget[$folder]}: lower the row"
        loose=1
    }
done
say $stale "every row of the budget is a folder"
say $over "every folder is within its budget"
say $loose "budgets are near the sizes"
exit $failed
