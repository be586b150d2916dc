#!/usr/bin/env bash
# One model with everything in it (Mamba, attention, experts, a shared expert, hyper-connections, a prediction depth, dropout) on every kind
# of mesh, as processes of mpirun (threads where there is none): ten steps give the losses of one rank, and what one mesh saved
# another continues.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
model=(--model.hidden=16 --model.heads=2 --model.kv_heads=2 --model.head_dim=8 --model.ffn=24 --model.experts=8 --model.topk=2 --model.expert_ffn=12
    --model.shared_ffn=8 --model.seq_aux_loss=0.01 --model.mhc_streams=2 --model.mhc_gating=0.5 --model.mtp_scale=0.3 --model.dropout=0.1
    --model.mamba_head_dim=8 --model.mamba_state=8 --model.mamba_chunk=8 --model.init_std=0.1
    --train.seq=16 --train.micro_batch=1 --train.global_batch=16  --train.schedule=constant --train.lr=1e-3 --run.save_every=0
    --run.tensorboard=off --run.report=off)
steps=10
flat='--model.pattern=[M-][*E][M-][*E]/*E'
cut2='--model.pattern=[M-][*E]|[M-][*E]/*E'
cut4='--model.pattern=[M-]|[*E]|[M-]|[*E]/*E'
empty='--model.pattern=[M-][*E]|[M-]|[*E]|/*E'
if command -v mpirun >/dev/null && ! "$BRAID" train "$tiny" --parallel.comm=mpi 2>&1 | grep -q 'built without MPI'; then
    on() { # ranks, training options...
        local n=$1
        shift
        # A build with ASan looks for leaks where ranks are threads only: Open MPI itself has some.
        ASAN_OPTIONS=detect_leaks=0 timeout 120 mpirun --oversubscribe --allow-run-as-root -np "$n" "${train_tiny[@]}" "${model[@]}" --train.steps=$steps "$@"
    }
else
    echo "no mpirun, or built without MPI: ranks are threads"
    on() {
        local n=$1
        shift
        train "${model[@]}" --train.steps=$steps --parallel.ranks="$n" "$@"
    }
fi
close() { # A B: losses agree to 1e-5 at every step
    paste -d' ' <(losses "$dir/$1") <(losses "$dir/$2") |
        awk '{ d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || d > 1e-5 * $2) { bad = 1; print "  step " NR ": " $0 } } END { exit bad || NR != 10 }'
}
mesh() { # name, ranks, options...: ten steps, compared with one rank
    local name=$1 n=$2
    shift 2
    ok "$name runs" runs on "$n" "$@" --run.dir="$dir/$name"
    ok "$name has the losses of one rank" close one "$name"
}

ok "one rank" runs train "${model[@]}" --train.steps=$steps "$flat" --run.dir="$dir/one"
mesh DP4 4 "$flat"
mesh DP4-zero3 4 "$flat" --parallel.zero=3
mesh DP2xPP2-zero2 4 "$cut2" --parallel.pp=2 --parallel.zero=2
mesh EP4 4 "$flat" --parallel.ep=4
mesh PP4 4 "$cut4" --parallel.pp=4
mesh PP2xVPP2 2 "$cut4" --parallel.pp=2
mesh DP2xEP2 4 "$flat" --parallel.ep=2
mesh EP2xETP2 4 "$flat" --parallel.ep=2 --parallel.etp=2
mesh PP2xEP2 4 "$cut2" --parallel.pp=2 --parallel.ep=2
mesh PP2xVPP2xEP2-overlap 4 "$cut4" --parallel.pp=2 --parallel.ep=2 --parallel.overlap=ep --plan.delay_dw=on
mesh VPP4 1 "$cut4" --parallel.vpp=4
mesh CP4 4 "$flat" --parallel.cp=4
mesh CP4-ring 4 "$flat" --parallel.cp=4 --parallel.cp_comm=ring
mesh DP2xCP2-zero3 4 "$flat" --parallel.cp=2 --parallel.zero=3
mesh CP2xPP2xEP2 4 "$cut2" --parallel.cp=2 --parallel.pp=2 --parallel.ep=2
mesh MTP-alone 4 "$empty" --parallel.pp=4
mesh MTP-alone-VPP2xEP2-overlap 4 "$empty" --parallel.pp=2 --parallel.ep=2 --parallel.overlap=ep

# Every schedule of one mesh has the bits of the plain one.
plain=(4 "$cut4" --parallel.pp=2 --parallel.ep=2)
ok "the plain schedule" runs on "${plain[@]}" --run.dir="$dir/plain"
ok "overlap changes no bit" same "$dir/plain" "$dir/PP2xVPP2xEP2-overlap"
ok "recompute" runs on "${plain[@]}" --plan.recompute=full --run.dir="$dir/recompute"
ok "changes no bit" same "$dir/plain" "$dir/recompute"
ok "random lanes" runs on "${plain[@]}" --parallel.overlap=ep --plan.random_lanes=5 --plan.poison=on --run.dir="$dir/random"
ok "change no bit" same "$dir/plain" "$dir/random"

# What one mesh saved, another continues: right after loading the same bits, and then the same losses.
continues() { # from, ranks, options...
    local from=$1 n=$2
    shift 2
    cp -r "$dir/$from" "$dir/next"
    runs on "$n" "$@" --run.dir="$dir/next" && losses "$dir/next" | awk '{ print $2 }' | tail -2 >"$dir/tail"
    local rc=$?
    rm -rf "$dir/next"
    return $rc
}
agrees() { paste -d' ' "$dir/tail.one" "$dir/tail" | awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-5 * $1) bad = 1 } END { exit bad || NR != 2 }'; }
steps=12
ok "one rank continues what it saved" continues one 1 "$flat"
cp "$dir/tail" "$dir/tail.one"
ok "one rank continues what PP2xVPP2xEP2 saved" continues PP2xVPP2xEP2-overlap 1 "$flat"
ok "alike" agrees
ok "EP4 continues what PP4 saved" continues PP4 4 "$flat" --parallel.ep=4
ok "alike" agrees
ok "CP2xEP4 continues what CP4 saved" continues CP4 4 "$flat" --parallel.cp=2 --parallel.ep=4
ok "alike" agrees
ok "EP4 continues what EP2xETP2 saved" continues EP2xETP2 4 "$flat" --parallel.ep=4
ok "alike" agrees
ok "ETP4 continues what EP4 saved" continues EP4 4 "$flat" --parallel.etp=4
ok "alike" agrees
ok "PP2xVPP2 continues what EP4 saved" continues EP4 2 "$cut4" --parallel.pp=2
ok "alike" agrees

# '|' without stages says nothing, in a plan as in a run; virtual stages that are asked for are had, on one rank too.
cut=(--model.pattern='*-|*-|*-|*-' --train.warmup=0)
allocated() { sed -nE 's/.*, (.*) planned and allocated.*/\1/p' "$dir/err"; }
as_planned() { # options...: a run on one rank takes what the plan says
    local took
    runs "$BRAID" train "$tiny" --data.train="$book" --run.threads=1 "${cut[@]}" --train.steps=2 "$@" && took=$(allocated) && [ -n "$took" ] &&
        prints "^total .*$took\$" "$BRAID" plan "$tiny" --run.threads=1 "${cut[@]}" "$@"
}
ok "segments on one rank take what the plan says" as_planned
ok "so do virtual stages" as_planned --parallel.vpp=4
ok "segments on one rank" runs train "${cut[@]}" --train.steps=5 --run.dir="$dir/segments"
ok "virtual stages on one rank" runs train "${cut[@]}" --train.steps=5 --parallel.vpp=4 --run.dir="$dir/virtual"
ok "have the same bits" same "$dir/segments" "$dir/virtual"
ok "and cannot be had without segments" fails 2 'parallel.pp * parallel.vpp segments are needed' train --parallel.vpp=2

# What travels, and sizes that do not divide.
paper=(plan "$tiny" "${model[@]}" "$flat" --parallel.ranks=4 --parallel.ep=2)
ok "the plan shows the rows that travel: 16 tokens, for 2 ranks" prints 'back (.*); 32 rows, of which' "$BRAID" "${paper[@]}"
ok "codes are fewer bytes" prints 'buffers of 1.50 KiB there' "$BRAID" "${paper[@]}" --parallel.ep_fp8=dispatch
ok "ranks that do not divide by ep and etp" fails 2 "use parallel.ep = 2 and parallel.etp = 2" "$BRAID" "${paper[@]}" --parallel.etp=4
ok "channels that do not divide by etp" fails 2 "for example --model.expert_ffn=" "$BRAID" "${paper[@]}" --parallel.etp=5
finish
