#!/usr/bin/env bash
# What a new user meets in the first hour: help, advice, plain messages, what is said at the start and at the end, and what a run
# folder may be.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1

# ---- help ---------------------------------------------------------------------------------------------------------
for word in train generate eval plan gradcheck verify bench op grads; do
    try "$BRAID" $word --help
    ok "help of $word fits on two screens" test $rc -eq 0 -a "$(wc -l <out)" -le 80
done
ok "a command's help names its own options" prints '^  --data.train ' "$BRAID" train --help
ok "and not all" test "$(grep -c plan.poison out)" -eq 0
ok "--help=all explains all of them" prints 'plan.poison' "$BRAID" train --help=all
ok "--help=SECTION explains a section" prints '^  --train.lr=' "$BRAID" train --help=train
ok "and no other" test "$(grep -c '^  --model' out)" -eq 0
ok "braid help lr explains the learning rate" prints '^  --train.lr=number' "$BRAID" help lr
ok "with the rules about it" grep -q 'rule: .*train.lr' out
ok "help knows other programs' names" prints '^  --train.lr=number' "$BRAID" help learning_rate
ok "help finds a part of a name" prints 'model.attn_window=' "$BRAID" help window
ok "help on nothing is an error" fails 2 "there is no help on 'qqqq'" "$BRAID" help qqqq
ok "help on tensor parallelism" prints 'parallel.tp' "$BRAID" help tp
ok "help on what is not built says so" fails 2 'an average of weights (EMA) is not built' "$BRAID" help ema
ok "help on a section that is a command, too, says so" prints 'braid train --help' "$BRAID" help train
ok "braid --version" prints '^braid [0-9]' "$BRAID" --version

# ---- advice -------------------------------------------------------------------------------------------------------
ok "tensor parallelism needs its ranks" fails 2 'start a multiple of 2 ranks' "$BRAID" train --tensor-model-parallel-size 2
ok "pipeline stages need theirs" fails 2 '1 ranks do not divide into parallel.pp = 2' "$BRAID" train --parallel.pp=2
ok "what is not built says so" fails 2 'an average of weights (EMA) is not built' "$BRAID" train --ema=1
ok "a synonym" fails 2 'it is called --train.lr here' "$BRAID" train --train.learning_rate=1
ok "a synonym of two" fails 2 '--train.micro_batch here, or --train.global_batch' "$BRAID" train --batch_size=1
ok "a short trial is told a warm-up that works" fails 2 'for example --train.warmup=1;' "$BRAID" plan --train.steps=10 --train.warmup=100
ok "and it does" runs "$BRAID" plan "$tiny" --train.steps=10 --train.warmup=1

# ---- slips --------------------------------------------------------------------------------------------------------
touch a.yaml
ok "an option with one dash" fails 2 'two dashes: --lr' "$BRAID" train -lr 3
mkdir folder
ok "train a.yaml" fails 2 'INI files' "$BRAID" train a.yaml
ok "train FOLDER" fails 2 '--run.dir=folder' "$BRAID" train folder
ok "train TEXT" fails 2 "--data.train=$book" "$BRAID" train "$book"
ok "generate CONFIG" fails 2 'holds options, not a trained model' "$BRAID" generate "$tiny"
ok "data tokenize --in=FILE --out=PREFIX" prints 'wrote tok.bin' "$BRAID" data tokenize --in="$book" --out=tok
if "$BRAID" --version | grep -q 'CPU only'; then
    ok "a GPU without CUDA" fails 1 'built without CUDA' train --run.device=cuda
elif [ ! -e /proc/driver/nvidia/version ]; then
    ok "a GPU without a driver" fails 1 'no NVIDIA driver' train --run.device=cuda
fi

# ---- patterns -----------------------------------------------------------------------------------------------------
small="--model.hidden=16 --model.heads=2 --model.vocab=256 --train.seq=8 --train.micro_batch=1"
mamba=--model.mamba_head_dim=8
ok "[*-]x3 and (M-)x2 are written out" cmp <("$BRAID" plan $small $mamba --model.pattern='[*-]x3(M-)x2') <("$BRAID" plan $small $mamba --model.pattern='[*-][*-][*-]M-M-')
ok "--num-layers alone is a Transformer" cmp <("$BRAID" plan $small --num-layers 3) <("$BRAID" plan $small --model.pattern='[*-][*-][*-]')
ok "which is not said to be unused" test "$("$BRAID" plan $small --num-layers 3 2>&1 | grep -c 'not used\|no effect')" -eq 0
ok "with experts where they are given" prints '\[\*E\]' "$BRAID" plan $small --num-layers 2 --num-experts 4
ok "a repeat that makes no sense" fails 2 'nothing in front of this repeat' "$BRAID" plan --model.pattern='x3M'

# ---- what a run says -----------------------------------------------------------------------------------------------
loud() { "$BRAID" train "$tiny" --data.train="$book" --run.threads=1 "$@"; }
ok "a run" runs loud --run.dir=a --train.steps=30 --run.save_every=10
ok "saves are one line with size and path" grep -qE '^saved step 10 \([0-9.]+ KiB\): a/checkpoints/step-00000010$' err
ok "the result is on stdout" grep -qE '^30 steps, .* tokens in .*: loss [0-9.]+ \(began at [0-9.]+\)$' out
ok "with the report" grep -q '^report: a/report.html$' out
ok "and the next command" grep -q '^next: *braid generate a ' out
ok "which works" runs "$BRAID" generate a --generate.tokens=3 --run.threads=1
ok "run.quiet prints the result" prints '^20 steps, .*loss' train --run.dir=quiet
ok "and nothing else" test "$(cat out err | wc -l)" -eq 1
ok "without a run folder the start says what is lost" says 'the model will not be saved; --run.dir=DIR keeps it' loud --train.steps=5
ok "and so does the end" grep -q 'the model was not saved' out
ok "with one it does not" test "$(loud --run.dir=b --train.steps=5 2>&1 | grep -c 'not saved\|not be saved')" -eq 0
if command -v script >/dev/null; then
    width() { script -qec "stty cols $1; $BRAID train $tiny --data.train=$book --run.threads=1 --train.steps=30" /dev/null </dev/null | grep -ao '─*' | head -1 | wc -m; }
    ok "the chart is as wide as the terminal" test "$(($(width 90) - $(width 60)))" -eq 30
fi

# ---- run folders ---------------------------------------------------------------------------------------------------
mkdir papers papers/sub mine
cp "$book" papers/
touch mine/slurm-1.out
ok "a folder that is not a run is refused" fails 2 'papers is not a run: it holds' train --run.dir=papers
ok "and left alone" test "$(ls papers | tr '\n' ' ')" = 'sub text.txt '
ok "so is a run inside the data" fails 2 'lies in the data folder' "$BRAID" train "$tiny" --data.train=papers --run.dir=papers/sub/run
ok "and nothing is made there" test ! -e papers/sub/run
ok "a file is no run folder" fails 2 'is a file, and a run is a folder' train --run.dir="$book"
ok "a launcher's log is no hindrance" runs train --run.dir=mine
for _ in $(seq 90); do echo '{"text": "a line of JSON that becomes a document"}'; done >lines.jsonl
odd() { "$BRAID" train "$tiny" --data.train=lines.jsonl --run.dir=odd --run.threads=1 --run.quiet=on "$@"; }
ok "a run whose second stage is refused when its text is prepared" fails 2 'cannot be shared by 2 ranks' odd --model.pattern=--G- \
    --model.gdn_value_heads=1 --model.gdn_value_dim=4 --parallel.ranks=4 --parallel.pp=2 --parallel.tp=2
ok "leaves a folder with that text" test -d odd/tokens
ok "in which the next one starts" runs odd
cp -r a gone
rm -r gone/checkpoints
ok "a run whose checkpoints are gone starts with its options" says 'a new run with the options of gone/config.ini' "$BRAID" train --run.dir=gone
ok "and gives the same bits" same a gone
ok "its old log is set aside" test "$(steps_done gone) $(grep -c '"loss"' gone/metrics.1.jsonl)" = '30 30'
rm -r gone/checkpoints
ok "another model is a new run" says 'is of another model' "$BRAID" train --run.dir=gone --model.hidden=16 --model.heads=2 --train.steps=2 --data.train="$book" --train.seq=8 --train.micro_batch=1

# ---- killed and continued ---------------------------------------------------------------------------------------------
start --run.dir=killed --train.steps=100000 --run.save_every=50 --train.schedule=constant
wait_for_step killed 75 $pid
kill -KILL $pid
wait $pid 2>/dev/null
n=$(($(steps_done killed) + 60))
ok "a killed run continues" says 'continuing killed at step' train --run.dir=killed --train.steps=$n --train.schedule=constant
ok "each step is in metrics.jsonl once, in order" cmp <(sed -nE 's/^\{"step":([0-9]+),"loss".*/\1/p' killed/metrics.jsonl) <(seq $n)
ok "nothing half-written is left" no_leftovers killed

# ---- runs that go wrong ----------------------------------------------------------------------------------------------
ok "divergence is said" says 'the run has diverged: at step' loud --train.steps=60 --train.lr=10 --train.clip=0
ok "once" test "$(grep -c 'diverged' err)" -eq 1
ok "gradients that are all zero are said" grep -q 'all gradients of step [0-9]* are zero' <(loud --train.steps=10 --train.lr=100 --train.clip=0 2>&1)
ok "nonfinite=skip has a bound" fails 1 'train.nonfinite_limit: 3 steps in a row were skipped' train --train.steps=200 --train.lr=100 --train.clip=0 --train.nonfinite=skip --train.nonfinite_limit=3
ok "which without skip has no effect, and that is said" says 'train.nonfinite_limit' loud --train.steps=3 --train.nonfinite_limit=3
ok "after so many" test "$(loud --train.steps=200 --train.lr=100 --train.clip=0 --train.nonfinite=skip --train.nonfinite_limit=3 2>&1 | grep -c ' skipped: loss')" -eq 3
zeros() { # options...: zeros among the gradients of each step
    rm -rf zeros && train --run.dir=zeros --train.steps=3 --model.tied=off "$@" >/dev/null && sed -n 's/.*"num-zeros":\([0-9]*\).*/\1/p' zeros/metrics.jsonl | tr '\n' ' '
}
want=$(zeros --log-num-zeros-in-grad)
ok "zeros of gradients are counted: rows of bytes that the text has not" test "$(wc -w <<<"$want") $((${want%% *} > 1000 && ${want%% *} % 32 == 0))" = '3 1'
ok "on two ranks the same number" test "$(zeros --train.log_zeros=on --parallel.ranks=2)" = "$want"
ok "without ZeRO, too" test "$(zeros --train.log_zeros=on --parallel.ranks=2 --parallel.zero=off)" = "$want"
ok "and with shards of weights" test "$(zeros --train.log_zeros=on --parallel.ranks=2 --parallel.zero=3)" = "$want"
ok "and on two stages" test "$(zeros --train.log_zeros=on --parallel.ranks=2 --parallel.pp=2)" = "$want"

# ---- bench -----------------------------------------------------------------------------------------------------------
ok "bench train has its own number of steps" prints '^steps: 20$' "$BRAID" bench train "$tiny" --run.threads=1 --train.warmup=0
ok "--steps sets it" prints '^steps: 4$' "$BRAID" bench train "$tiny" --run.threads=1 --steps=4
cd / && finish
