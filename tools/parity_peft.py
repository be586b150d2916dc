#!/usr/bin/env python3
"""LoRA against PEFT: braid and PEFT fine-tune the same tiny Llama from the same adapters, in fp32.

    tools/parity_peft.py [--braid=build/braid] [--targets=all-linear] [--rank=4] [--alpha=8] [--steps=20] [--golden]

The base is tests/hf/fixtures/llama. Every step sees all samples, so that their order does not matter. braid's first adapters
(a run with learning rate 0) are exported with `braid export --format=peft` and loaded by PEFT, which trains on; losses of each
step, the adapters at the end and the logits of the merged model are compared. The exit code is 1 beyond 1e-4.
--golden prints PEFT's losses, which tests/cmd/test_lora.sh holds. Needs torch, transformers, peft, safetensors.
"""
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BASE = os.path.join(ROOT, "tests/hf/fixtures/llama")
SEQ, SAMPLES, VOCAB, LR, BETAS, EPS, DECAY, CLIP = 8, 16, 40, 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0


def tokens():
    return [i * i % 37 for i in range(SEQ * SAMPLES + 1)]


def write_shard(path):
    """An llm.c shard, which braid reads as it is."""
    t = tokens()
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(t), *([0] * 253)))
        f.write(struct.pack(f"<{len(t)}H", *t))


def braid(args, *words):
    done = subprocess.run([args.braid, *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"braid {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def train(args, folder, run, steps, *more):
    braid(args, "train", f"--init={BASE}", f"--data.train={folder}/shard.bin", f"--run.dir={run}", f"--train.steps={steps}", f"--train.seq={SEQ}",
          "--train.micro_batch=4", f"--train.global_batch={SAMPLES}", "--train.schedule=constant", "--train.warmup=0", f"--train.lr={LR}",
          f"--train.weight_decay={DECAY}", f"--train.clip={CLIP}", "--train.eval_every=0", "--train.log_every=1", "--run.quiet=on", "--run.threads=1",
          f"--lora.rank={args.rank}", f"--lora.alpha={args.alpha}", f"--lora.targets={args.targets}", *more)


def braid_losses(run):
    rows = [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl"))]
    return [r["loss"] for r in rows if "loss" in r and "step" in r]


def peft_losses(args, adapters):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, adapters, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    t = torch.tensor(tokens())
    x, y = t[:-1].view(SAMPLES, SEQ), t[1:].view(SAMPLES, SEQ)
    losses = []
    for _ in range(args.steps):
        loss = torch.nn.functional.cross_entropy(model(input_ids=x).logits.view(-1, VOCAB), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model, x, model(input_ids=x).logits


def compare_end(args, folder, model, x, logits):
    """Adapters after the last step, and the merged model as transformers reads it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    braid(args, "export", f"{folder}/run", f"{folder}/last", "--format=peft")
    braid(args, "export", f"{folder}/run", f"{folder}/merged", "--format=hf", "--dtype=f32")
    ours = load_file(f"{folder}/last/adapter_model.safetensors")
    theirs = {k.replace(".default", ""): v for k, v in model.state_dict().items() if "lora_" in k}
    if sorted(ours) != sorted(theirs):
        sys.exit(f"adapters have other names: {sorted(set(ours) ^ set(theirs))[:4]}")
    adapters = max((ours[k] - theirs[k]).abs().max().item() for k in ours)
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return adapters, (merged(input_ids=x).logits - logits).abs().max().item()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--braid", default=os.path.join(ROOT, "build/braid"))
    p.add_argument("--targets", default="all-linear")
    p.add_argument("--rank", type=int, default=4)
    p.add_argument("--alpha", type=float, default=8)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--golden", action="store_true")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shard(f"{folder}/shard.bin")
        train(args, folder, f"{folder}/begin", 1, "--group.all.match=*", "--group.all.lr=0")
        braid(args, "export", f"{folder}/begin", f"{folder}/first", "--format=peft")
        train(args, folder, f"{folder}/run", args.steps)
        ours = braid_losses(f"{folder}/run")
        theirs, model, x, logits = peft_losses(args, f"{folder}/first")
        adapters, merged = compare_end(args, folder, model, x, logits)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if args.golden:
        print(" ".join(f"{v:.6f}" for v in theirs))
    print(f"{args.steps} steps, {args.targets}, rank {args.rank}: loss {theirs[0]:.6f} -> {theirs[-1]:.6f}, largest difference {worst:.2e}; "
          f"adapters {adapters:.2e}; logits of the merged model {merged:.2e}")
    return 1 if not worst <= 1e-4 else 0


if __name__ == "__main__":
    sys.exit(main())
