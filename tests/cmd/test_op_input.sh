#!/usr/bin/env bash
# `braid op` on files with indices that lead out of their tensors, and with absurd attributes: refused with the tensor, the place and the
# value, on both host devices.
. "$(dirname "$0")/lib.sh"

i32() { # numbers...: as the four bytes of a file, in printf's notation
    local v
    for v in "$@"; do printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((v & 255)) $((v >> 8 & 255)) $((v >> 16 & 255)) $((v >> 24 & 255)); done
}
zeros() { # n: bytes
    local i
    for ((i = 0; i < $1; i++)); do printf '\\x00'; done
}
# A safetensors file of tensors given as: name type shape bytes-in-printf-notation ...
tensors() { # file, tensors...
    local file=$1 header="" data="" at=0 n
    shift
    while [ $# -gt 0 ]; do
        n=$((${#4} / 4))
        header+="${header:+,}\"$1\":{\"dtype\":\"$2\",\"shape\":[$3],\"data_offsets\":[$at,$((at + n))]}"
        data+=$4
        at=$((at + n))
        shift 4
    done
    header="{$header}"
    n=${#header}
    printf "$(i32 "$n" 0)$(printf '%s' "$header" | sed 's/%/%%/g')$data" >"$file"
}
call() { "$BRAID" op "$1" --in="$dir/in" --out="$dir/result" --dev="$dev" "${@:2}"; }

for dev in ref cpu; do
    # Two tokens of two channels, two choices each, four rows.
    x=$(zeros 16) rows=$(zeros 32)
    tensors "$dir/in" x F32 2,2 "$x" src I32 4 "$(i32 0 1 2 3)" prob F32 2,2 "$x"
    ok "$dev: permute" runs call permute k=2
    for bad in 4 99 2147483647 -2 -2147483648; do
        tensors "$dir/in" x F32 2,2 "$x" src I32 4 "$(i32 0 1 2 $bad)"
        ok "$dev: permute with src $bad" fails 1 "src[3] is $bad" call permute k=2
        tensors "$dir/in" dy F32 4,2 "$rows" row I32 2,2 "$(i32 0 1 $bad 3)"
        ok "$dev: permute_bwd with row $bad" fails 1 "row[2] is $bad" call permute_bwd k=2
        tensors "$dir/in" x F32 4,2 "$rows" row I32 2,2 "$(i32 0 1 $bad 3)"
        ok "$dev: unpermute with row $bad" fails 1 "row[2] is $bad" call unpermute k=2
        tensors "$dir/in" dy F32 2,2 "$x" src I32 4 "$(i32 0 $bad 2 3)"
        ok "$dev: unpermute_bwd with src $bad" fails 1 "src[1] is $bad" call unpermute_bwd k=2
    done
    tensors "$dir/in" x F32 2,2 "$x" src I32 4 "$(i32 0 1 2 3)" row I32 2,2 "$(i32 0 1 2 7)"
    ok "$dev: permute with a row map beyond its rows" fails 1 "row[3] is 7" call permute k=2
    tensors "$dir/in" logits F32 2,3 "$(zeros 24)" idx I32 2,2 "$(i32 0 1 2 3)" dprobs F32 2,2 "$x"
    ok "$dev: router_bwd with an expert that is not there" fails 1 "idx[3] is 3" call router_bwd seq=2
    tensors "$dir/in" offset I32 3 "$(i32 0 2 9)" row I32 2,2 "$(i32 0 1 2 3)" src I32 4 "$(i32 0 1 2 3)"
    ok "$dev: epsend with offsets beyond its rows" fails 1 "offset[2] is 9" call epsend ranks=2 cap=4
    tensors "$dir/in" offset I32 3 "$(i32 0 3 2)" row I32 2,2 "$(i32 0 1 2 3)" src I32 4 "$(i32 0 1 2 3)"
    ok "$dev: epsend with offsets that fall" fails 1 "offset[2] is 2" call epsend ranks=2 cap=4
    tensors "$dir/in" offset I32 3 "$(i32 0 2 4)" row I32 2,2 "$(i32 0 1 2 3)" src I32 4 "$(i32 0 1 2 50)"
    ok "$dev: epsend with a choice that is not there" fails 1 "src[3] is 50" call epsend ranks=2 cap=4
    ok "$dev: epsend with buffers of 1e18 rows" fails 1 "attribute cap" call epsend ranks=2 cap=1e18
    tensors "$dir/in" idx I32 2,2 "$(i32 0 3 1 -1)"
    ok "$dev: epdest" runs call epdest ranks=2 local=2 most=2
    ok "$dev: epdest with an expert that is not there" fails 1 "choice 1 is expert 3 of 2" call epdest ranks=2 local=1 most=2
    ok "$dev: epdest with 1e300 ranks for a token" fails 1 "attribute most" call epdest ranks=2 local=2 most=1e300
    tensors "$dir/in" idx I32 2,2 "$(i32 0 3 1 -1)" to I32 2,2 "$(i32 0 2 1 -1)" from I32 4 "$(i32 0 2 1 -1)"
    ok "$dev: epchoices" runs call epchoices ranks=2 local=2 per=2
    ok "$dev: epchoices with 1e18 choices of a row" fails 1 "attribute per" call epchoices ranks=2 local=2 per=1e18
    ok "$dev: epchoices with 0 experts on a rank" fails 1 "0 experts" call epchoices ranks=2 local=0 per=2
    tensors "$dir/in" idx I32 2,2 "$(i32 0 3 1 -1)" to I32 2,2 "$(i32 0 2 9 -1)" from I32 4 "$(i32 0 2 1 -1)"
    ok "$dev: epchoices with a place that is not there" fails 1 "to[2] is 9" call epchoices ranks=2 local=2 per=2
    tensors "$dir/in" x F32 2,2 "$x" src I32 2 "$(i32 1 5)"
    ok "$dev: row8_pack with a row that is not there" fails 1 "src[1] is 5" call row8_pack
    tensors "$dir/in" x F32 2,2 "$x" src I32 4 "$(i32 0 1 2 3)"
    ok "$dev: permute with 1e19 choices" fails 1 "attribute k" call permute k=1e19
    tensors "$dir/in" x F32 0,1099511627776 "" src I32 0 ""
    ok "$dev: permute of no rows of 2^40 channels" fails 1 "x is" call permute k=2
done
finish
