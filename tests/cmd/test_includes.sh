#!/usr/bin/env bash
# The shape of the sources: who includes whom (the uses_ table of the Makefile), where vendors' headers
# may appear, functions that are not used, and how long files get. Needs no binary.
set -u
shopt -s lastpipe # so that `none`, at the end of a pipe, can set failed
cd "$(dirname "$0")/../.." || exit 1
failed=0
list=$(mktemp) || exit 1
trap 'rm -f "$list" "$list.outside"' EXIT

none() { # "sentence": standard input, the offences, is empty
    cat >"$list"
    if [ -s "$list" ]; then
        echo "not ok $1"
        sed 's/^/  /' "$list" | head -20
        failed=1
    else
        echo "ok $1"
    fi
}

# "folder: what it may include"; a $(uses_x) inside stands for the row of x.
folders=$(sed -nE 's/^FOLDERS *:= *//p' Makefile)
declare -A uses
while read -r folder row; do
    for word in $row; do
        case $word in
        '$(uses_'*) word=${word#'$(uses_'} && uses[$folder]+=" ${uses[${word%)}]}" ;;
        *) uses[$folder]+=" $word" ;;
        esac
    done
done < <(sed -nE 's/^uses_([a-z]+) *:= */\1 /p' Makefile)

find src -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort >"$list"
mapfile -t files <"$list"
if [ "${#files[@]}" -gt 50 ] && [ -n "$folders" ]; then echo "ok sources and the table are found"; else
    echo "not ok sources and the table are found"
    failed=1
fi

# file:line:header of every #include "..." and of every #include <...>
own() { grep -nHE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "${files[@]}" | sed -E 's/#[[:space:]]*include[[:space:]]*"([^"]*)".*/\1/; s/:[[:space:]]+/:/g'; }
foreign() { grep -nHE '^[[:space:]]*#[[:space:]]*include[[:space:]]*<' "${files[@]}"; }

for folder in src/*/; do
    folder=${folder#src/} folder=${folder%/}
    [[ " $folders " == *" $folder "* ]] || echo "src/$folder is not in FOLDERS of the Makefile"
done | none "every folder has a row in the table"

own | while IFS=: read -r file line header; do
    folder=${file#src/} folder=${folder%%/*} from=${header%%/*}
    if [ ! -e "src/$header" ]; then
        echo "$file:$line: \"$header\" is not a path below src/"
    elif [ "$from" != "$folder" ] && [[ " ${uses[$folder]-} " != *" $from "* ]]; then
        echo "$file:$line: $folder may not include $header"
    fi
done | none "every include is allowed by the table"

own | while IFS=: read -r file line header; do
    case $header in *_int.h) ;; *) continue ;; esac
    mine=$(dirname "${file#src/}") theirs=$(dirname "$header")
    # Folders below share what lies in the folder itself: single ops in src/ops, layouts of keys in src/ckpt.
    [[ "$mine/" == "$theirs/"* ]] ||
        echo "$file:$line: $header is private to src/$theirs"
done | none "private headers stay in their folder"

# A public header is what its folder promises to others: it does not bring private ones along, and somebody else includes it.
# Below src/ops single ops share headers (cpu_*.h, ref_scan.h), base.h is the sum of its folder's, and braidk.h is for other programs.
own | while IFS=: read -r file line header; do
    case $file in src/ops/* | *_int.h | *.c | *.cu) continue ;; esac
    case $header in *_int.h) echo "$file:$line: a public header includes the private $header" ;; esac
done | none "public headers do not include private ones"

own | awk -F: '{ split(substr($1, 5), d, "/"); split($3, h, "/"); if (d[1] != h[1]) print $3 }' | sort -u >"$list.outside"
for file in "${files[@]}"; do
    case $file in src/ops/* | src/base/* | src/cmd/cmd.h | src/lib/braidk.h | *_int.h | *.c | *.cu | *.cuh) continue ;; esac
    grep -qxF "${file#src/}" "$list.outside" && continue
    # A part of the folder's public header (model/pattern.h in model.h) is public too.
    part=no
    for public in $(dirname "$file")/*.h; do
        case $public in *_int.h) ;; *) grep -qF "#include \"${file#src/}\"" "$public" && part=yes ;; esac
    done
    [ "$part" = yes ] || echo "$file is used in its own folder only: name it ${file%.h}_int.h"
done | none "headers that only their own folder uses are private by name"

foreign | grep -E '<(cuda|cublas|cudnn|nccl|mpi|nvtx|nvml|mma)[^>]*>' | grep -vE '^src/(dev|comm)/|^[^:]*\.cuh?:' |
    none "vendors' headers appear only in dev, comm and .cu files"

grep -nHE '(^|[^A-Za-z0-9_>.])(strcpy|strcat|sprintf|vsprintf|strtok|gets|atoi|atol|atof|rand|srand|random|alloca|tmpnam|system)[[:space:]]*\(' "${files[@]}" |
    grep -vE '^[^:]*:[0-9]+:[[:space:]]*(\*|/\*)' | none "no function that cannot be used safely"

grep -nHE '\b(TODO|FIXME|XXX)\b' "${files[@]}" | grep -v 'XXXXXX' | none "nothing is left to do later"

wc -l "${files[@]}" | grep -v ' total$' | awk '{ limit = $2 ~ /\.cuh?$/ ? 1200 : 800; if ($1 > limit) print $2 ": " $1 " lines, at most " limit }' |
    none "no file is too long"

for file in "${files[@]}"; do
    head -n1 "$file" | grep -q '^/[*/]' || echo "$file"
done | none "every file opens by saying what it is"

exit $failed
