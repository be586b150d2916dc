#!/usr/bin/env bash
# Fails on phrases and identifiers that the project does not use, with the standard term to use instead.
#
#   tools/language.sh [PATH...]     default: sources, tests, documents, tools and configs; ./check runs it
#
# Exact phrases only: a single common word is never banned. A row of the table: pattern (grep -E) ;; where in path:line:text it counts ;; what to say.
set -u
cd "$(dirname "$0")/.." || exit 1
table='
\b[Ww]ays? back\b ;; . ;; backward pass
\b[Mm](ade|ake|akes|aking) again\b ;; . ;; recompute, recomputed
\btaken again\b ;; . ;; repeated, retried
\bof now\b ;; . ;; current
\bsaid plainly\b ;; . ;; note, limitation
\bto be asked for\b ;; . ;; opt-in, experimental
\b([Dd]ealt|[Dd]eals|[Dd]eal) out\b ;; . ;; distribute, shard, partition
\bspeaks\b ;; . ;; rank 0 prints; is_rank0
\w+_speaks\b ;; . ;; is_rank0
\bstop_wish\b ;; . ;; stop_request
\bmhc_way|\bMHC_WAY ;; . ;; mhc_path, MHC_PATH
\bmail_[a-z]|\bstruct mail\b ;; . ;; inbox, message
\bhall\b|\bhall_[a-z] ;; . ;; rendezvous
\bseats?\b ;; . ;; slot
\bletters?\b ;; ^(src/comm/|tests/comm/|tests/gpu/check_comm\.c|src/train/|src/optim/) ;; message
\bwritten twice\b ;; . ;; duplicated
\bstands elsewhere\b ;; . ;; name the place
^[[:space:]]*(/\*|//) Of  ;; \.(c|h|cc|cu|cuh): ;; a sentence with a subject
'
if [ $# -gt 0 ]; then
    paths=("$@")
else
    paths=(src tests docs tools configs README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md Makefile check demo .ci)
fi
# The table itself, its test and binary or recorded files are left out.
list=$(find "${paths[@]}" -type f ! -name language.sh ! -name test_meters.sh ! -name '*.png' ! -name '*.svg' ! -name '*.safetensors' \
    ! -name '*.bin' ! -path '*/corpus/*' ! -path '*/fixtures/*' ! -path '*/__pycache__/*' | sort)
bad=0
while read -r line; do
    [ -n "$line" ] || continue
    say=${line##* ;; } rest=${line% ;; *}
    where=${rest##* ;; } pattern=${rest%% ;; *}
    found=$(xargs -d '\n' grep -nHIE -e "$pattern" <<<"$list" | grep -E -e "$where")
    [ -n "$found" ] || continue
    n=$(wc -l <<<"$found")
    bad=$((bad + n))
    echo "say \"$say\":"
    head -n 20 <<<"$found" | cut -c1-160 | sed 's/^/  /'
    [ "$n" -le 20 ] || echo "  and $((n - 20)) more"
done <<<"$table"
# The same phrases where a line ends inside them.
broken=$(xargs -d '\n' perl -0ne 'while (/\b(ways?\s*\n[ *\/]*back|(?:made|makes?|taken)\s*\n[ *\/]*again|of\s*\n[ *\/]*now|(?:dealt|deals?)\s*\n[ *\/]*out|said\s*\n[ *\/]*plainly|written\s*\n[ *\/]*twice)\b/g) { my $t = $1; $t =~ s/\s*\n[ *\/]*/ /; print "  $ARGV: $t\n" }' <<<"$list")
if [ -n "$broken" ]; then
    bad=$((bad + $(wc -l <<<"$broken")))
    printf 'over a line break:\n%s\n' "$broken"
fi
[ "$bad" -eq 0 ] || { echo "language: $bad places use banned phrases"; exit 1; }
