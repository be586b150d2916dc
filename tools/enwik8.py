#!/usr/bin/env python3
"""enwik8: the text, PyTorch's side of the comparison, and the table of docs/QUALITY.md.

  enwik8.py fetch DIR                 DIR/train.txt (the first 90 MB) and DIR/valid.txt (the next 5 MB)
  enwik8.py train HF DATA RUN         transformers' model of folder HF on the batches that braid takes; writes RUN/metrics.jsonl
  enwik8.py table DIR                 bits per byte of every variant in DIR, mean and standard error over its seeds
"""
import argparse
import gzip
import hashlib
import json
import math
import pathlib
import re
import subprocess
import sys
import tarfile
import time

PACKAGE = "minGRU-pytorch==0.2.1"  # its source package holds the whole text
CHECKSUM = "d52ea2118b505f79007e084b2f49acef9fd0e45fb481f84b2cab0a7191a7ef60"  # sha256 of enwik8.gz
TRAIN, VALID = 90_000_000, 5_000_000
SEQ, BATCH, WARMUP, LR, MIN_LR = 1024, 64, 200, 1e-3, 1e-4  # configs/h200/enwik8.ini


def fetch_text(where):
    """The 100,000,000 bytes, fetched into the folder once."""
    path = where / "enwik8"
    if not path.exists():
        packages = where / "packages"
        pip = [sys.executable, "-m", "pip"]
        subprocess.run(pip + ["install", "-q", "hatchling"], check=True)  # what its metadata is made with
        subprocess.run(pip + ["download", "-q", "--no-deps", "-d", str(packages), "--no-build-isolation", "--no-binary", ":all:", PACKAGE], check=True)
        archive = tarfile.open(next(packages.glob("mingru*.tar.gz")))
        member = next(m for m in archive.getmembers() if m.name.endswith("data/enwik8.gz"))
        packed = archive.extractfile(member).read()
        if hashlib.sha256(packed).hexdigest() != CHECKSUM:
            sys.exit("enwik8.gz has another checksum than expected")
        path.write_bytes(gzip.decompress(packed))
    return path.read_bytes()


def fetch(args):
    where = pathlib.Path(args.dir)
    where.mkdir(parents=True, exist_ok=True)
    text = fetch_text(where)
    (where / "train.txt").write_bytes(text[:TRAIN])
    (where / "valid.txt").write_bytes(text[TRAIN : TRAIN + VALID])


# ---- PyTorch -----------------------------------------------------------------------------------


def learning_rate(step, steps):
    """Of update `step`, the first being 0."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    ratio = (step - WARMUP) / (steps - WARMUP)
    return MIN_LR + 0.5 * (math.cos(math.pi * ratio) + 1) * (LR - MIN_LR)


def sample_order(total, seed):
    """Megatron's order of the samples of one document, for less than an epoch."""
    import numpy

    order = numpy.arange((total - 1) // SEQ)
    numpy.random.RandomState(seed).shuffle(order)
    return order


def batch_at(text, starts, device):
    import torch

    rows = torch.stack([text[s * SEQ : s * SEQ + SEQ + 1] for s in starts]).to(device).long()
    return rows[:, :-1], rows[:, 1:]


def tensor_of(path):
    import numpy
    import torch

    return torch.from_numpy(numpy.fromfile(path, dtype=numpy.uint8))


def train(args):
    import torch
    import torch.nn.functional as F
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf, dtype=torch.float32).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda",
    )  # fmt: skip

    def loss_of(tokens, labels):
        with torch.autocast(device, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    compiled = torch.compile(loss_of) if device == "cuda" else loss_of
    text, valid = tensor_of(f"{args.data}/train.txt"), tensor_of(f"{args.data}/valid.txt")
    order = sample_order(len(text), args.seed)
    run = pathlib.Path(args.run)
    run.mkdir(parents=True, exist_ok=True)
    log, began, losses = open(run / "metrics.jsonl", "w"), time.time(), []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = compiled(*batch_at(text, order[step * args.batch : (step + 1) * args.batch], device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    for step, loss in enumerate(losses):
        log.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
    order = range((len(valid) - 1) // SEQ)
    with torch.no_grad():
        parts = [compiled(*batch_at(valid, order[k * args.batch : (k + 1) * args.batch], device)).item() for k in range(args.eval_batches)]
    mean = sum(parts) / len(parts) if parts else float("nan")
    log.write(json.dumps({"step": args.steps, "val_loss": mean, "seconds": time.time() - began}) + "\n")
    print(f"{args.steps} steps in {time.time() - began:.0f} s: loss {losses[-1].item():.4f}, validation {mean / math.log(2):.4f} bits per byte")


# ---- the table ---------------------------------------------------------------------------------


def read_run(folder):
    """Losses by step, and the last validation loss."""
    losses, valid = {}, None
    for line in open(folder / "metrics.jsonl", encoding="utf-8"):
        row = json.loads(line)
        if "val_loss" in row:
            valid = row["val_loss"]
        elif "loss" in row and "event" not in row:
            losses[row["step"]] = row["loss"]
    return losses, valid


def mean_and_error(values):
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, float("nan")
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


STEPS = ((1, 30), (31, 100), (101, 300), (301, 1000))  # first and last of a column


def print_steps(runs, base):
    """How far losses of single steps are from those of bf16 with the same seed: mean (largest) over ranges of steps."""
    print("\n| variant, seed | " + " | ".join(f"steps {first} to {last}" for first, last in STEPS) + " |")
    print("|---" * (1 + len(STEPS)) + "|")
    for name, seeds in runs.items():
        for seed in sorted(set(seeds) & set(base)) if name != "bf16" else ():
            losses, other, cells = seeds[seed][0], base[seed][0], []
            for first, last in STEPS:
                d = [abs(losses[k] - other[k]) for k in range(first, last + 1) if k in losses and k in other]
                cells.append(f"{sum(d) / len(d):.4f} ({max(d):.4f})" if d else "")
            print(f"| {name}, {seed} | " + " | ".join(cells) + " |")


def table(args):
    runs = {}
    for done in sorted(pathlib.Path(args.dir).glob("*/done")):
        name, seed = re.fullmatch(r"(.+)-(\d+)", done.parent.name).groups()
        runs.setdefault(name, {})[int(seed)] = read_run(done.parent)
    if not runs:
        sys.exit(f"there is no finished run in {args.dir}")
    base = runs.get("bf16", {})
    print("| variant | seeds | validation, bits/byte | to bf16, same seeds | largest difference of a step's loss, steps 1 to 100 |\n|---|---|---|---|---|")
    for name, seeds in runs.items():
        bits = [valid / math.log(2) for _, valid in seeds.values() if valid is not None]
        mean, error = mean_and_error(bits) if bits else (float("nan"), float("nan"))
        same = [s for s in seeds if s in base]
        ratio = [seeds[s][1] / base[s][1] - 1 for s in same if seeds[s][1] and base[s][1]]
        apart = [abs(loss - base[s][0][k]) for s in same for k, loss in seeds[s][0].items() if k <= 100 and k in base[s][0]]
        shift, spread = mean_and_error(ratio) if ratio else (float("nan"), float("nan"))
        print(f"| {name} | {len(seeds)} | {mean:.4f} ± {error:.4f} | {100 * shift:+.2f} % ± {100 * spread:.2f} | {max(apart, default=float('nan')):.4f} |")
    print_steps(runs, base)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("fetch", fetch), ("table", table)):
        one = commands.add_parser(name)
        one.add_argument("dir")
        one.set_defaults(run_command=function)
    one = commands.add_parser("train")
    for name in ("hf", "data", "run"):
        one.add_argument(name)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--steps", type=int, default=1000)
    one.add_argument("--batch", type=int, default=BATCH, help="sequences a step")
    one.add_argument("--eval-batches", type=int, default=76)
    one.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    one.set_defaults(run_command=train)
    args = parser.parse_args()
    args.run_command(args)


if __name__ == "__main__":
    main()
