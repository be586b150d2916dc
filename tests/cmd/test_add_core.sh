#!/usr/bin/env bash
# Adds a layer kind as CONTRIBUTING.md says, one file and a line in cores.def, and checks that pattern, rules, gradient check,
# plan, recompute, verify, checkpoints and generation find it without anything else being touched.
patch=add_core.patch
. "$(dirname "$0")/added.sh"

check "a tree with one more layer kind builds" make_copy b/braid b/tests/model/test_kinds
check "the patch is one file and a line of cores.def" touches_only '^src/layers/toy.c$\|^src/layers/cores.def$'
check "only its file and the list are compiled" test "$(objects_made)" -le $((3 + aware))
check "it says all that a kind must say" b/tests/model/test_kinds
tiny=(configs/tiny.ini --run.threads=1)
check "braid gradcheck finds its gradient right" b/braid gradcheck configs/tiny.ini --only=model --model.pattern='T*T-' --model.hidden=8 --model.heads=2 --model.ffn=12 --model.vocab=17 --train.seq=6
b/braid plan "${tiny[@]}" --model.pattern='[*T]-/T' >out 2>&1
check "braid plan shows it" found 'T\] toy '
check "its slot is recomputed by the group's name" b/braid plan "${tiny[@]}" --model.pattern='[*T]-' --plan.recompute=toy_linear
check "an option that it forbids is refused" fails_with 'rule toy-hidden-even' b/braid plan "${tiny[@]}" --model.pattern=T --model.hidden=33 --model.head_dim=4
check "an unknown symbol is answered with a list that has it" fails_with 'M - E T' b/braid plan "${tiny[@]}" --model.pattern='TU'
check "every mesh and schedule gives the same" b/braid verify configs/tiny.ini --model.pattern='T*T-' --only=2
check "and with hyper-connections" b/braid verify configs/tiny.ini --model.pattern='T*T-' --model.mhc_streams=2 --only=PP2
seq 1 3000 >text
train=(b/braid train "${tiny[@]}" --data.train=text --train.warmup=0 --run.quiet=on --run.tensorboard=off --run.report=off)
check "it is trained and saved" "${train[@]}" --model.pattern='[T*]-' --train.steps=2 --run.dir=a
check "and resumed" "${train[@]}" --model.pattern='[T*]-' --train.steps=3 --run.dir=a
check "its keys are converted to another layout" b/braid ckpt convert a flat.safetensors --layout=flat
check "and read back under the other numbers" "${train[@]}" --model.pattern='T*-' --train.steps=1 --run.load_weights=flat.safetensors
check "braid generate runs it" b/braid generate a --generate.prompt=12 --generate.tokens=4
exit $failed
