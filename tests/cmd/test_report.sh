#!/usr/bin/env bash
# The report of a run: there from the first step, loading itself again until the end; written anew and compared by `braid report`.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1

start --run.dir=live --train.steps=1000000 --train.warmup=1 --train.eval_every=0
wait_while_running "$pid" test -e live/report.html
cp live/report.html first.html
ok "a run that has only begun has a report" grep -q 'class=.badge running' first.html
ok "which loads itself again" grep -q "http-equiv='refresh'" first.html
kill -INT "$pid"
wait "$pid"
ok "when it was stopped it does so no more" test "$(grep -c "http-equiv='refresh'" live/report.html)" -eq 0
ok "and says so" grep -q 'class=.badge stopped' live/report.html

for h in 16 24; do
    runs train --run.dir=run-$h --model.hidden=$h --train.steps=60 --train.warmup=5 --data.split=90,10 --train.eval_every=20 \
        --run.sample_tokens=12 --generate.prompt=line || show $rc
done
for what in 'class=.badge finished' 'run.dir=run-16' 'commit\|gcc\|clang' "$(uname -n)" 'planned and allocated' 'What the model writes' \
    "class='by-tokens'" "class='by-time'" 'second half'; do
    ok "the report of a run has '$what'" grep -q "$what" run-16/report.html
done
cp run-16/report.html before.html
rm run-16/report.html
ok "braid report RUN writes it anew" prints run-16/report.html "$BRAID" report run-16
# The log holds nine digits of a number and milliseconds of time, so coordinates may differ, and on the time axis ticks.
strip() { sed "/div class='by-time'/,/p class='note'/d; s/[0-9.:e+-]*[0-9]//g" "$1"; }
ok "as it was, digits and the time axis aside" cmp <(strip before.html) <(strip run-16/report.html)
ok "two runs on one page" prints compare.html "$BRAID" report run-16 run-24
ok "with the option that differs" grep -q '<th>model.hidden</th><td>16</td><td>24</td>' compare.html
ok "and none that does not" test "$(grep -c '<th>train.steps</th>' compare.html)" -eq 0
ok "--out names the page" prints other.html "$BRAID" report run-16 run-24 --out=other.html
ok "nothing is loaded from elsewhere" test "$(grep -cE 'https?:|<script|src=|@import' compare.html run-16/report.html | awk -F: '{n += $2} END {print n}')" -eq 0
ok "a folder that is no run is refused" fails 1 'does not exist' "$BRAID" report "$dir"
ok "so are unknown options" fails 2 "unknown option '--nope'" "$BRAID" report run-16 --nope
ok "and no run at all" fails 2 'no run is named' "$BRAID" report
finish
