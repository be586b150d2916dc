#!/usr/bin/env bash
# docs/REPORTED.md is true: every command of the page succeeds, and prints the lines below it ("..." stands for anything) in their order.
. "$(dirname "$0")/lib.sh"
cd "$root" || exit 1
build=$(dirname "$BRAID")
trap 'rm -rf "$dir" runs/reported' EXIT

# A line of the page as a regular expression.
pattern() { sed 's/[][\\.*^$+?(){}|/]/\\&/g; s/\\\.\\\.\\\./.*/g' <<<"$1"; }
commands=0
check() { # command, lines it must print...
    local command=${1//build\//$build/} from=1 found want
    commands=$((commands + 1))
    shift
    if ! bash -c "set -o pipefail; $command" >"$dir/printed" 2>"$dir/err"; then
        echo "  failed: $command"
        tail -5 "$dir/printed" "$dir/err" | sed 's/^/  /'
        return 1
    fi
    for want in "$@"; do
        found=$(tail -n +$from "$dir/printed" | grep -nE -m1 -- "^$(pattern "$want")" | cut -d: -f1)
        [ -n "$found" ] || { echo "  not printed: $want"; tail -8 "$dir/printed" | sed 's/^/  /'; return 1; }
        from=$((from + found))
    done
}
section='' inside=no command='' lines=()
flush() {
    [ -z "$command" ] || ok "$section: ${command:0:70}" check "$command" "${lines[@]}"
    command='' lines=()
}
while IFS= read -r line; do
    case "$inside $line" in
    'no ## '*) section=${line#\#\# } ;;
    'no ```') inside=yes ;;
    'yes ```') flush; inside=no ;;
    'yes $ '*) flush; command=${line#\$ } ;;
    yes*) lines+=("$line") ;;
    esac
done <docs/REPORTED.md
ok "the page has commands for all eight complaints" test "$commands" -ge 14
ok "and each section names a thread" test "$(grep -c '^## ' docs/REPORTED.md)" -eq "$(awk '/^## /{getline; getline; if (/#[0-9]+/) n++} END {print n}' docs/REPORTED.md)"
finish
