#!/usr/bin/env python3
"""Training speed of PyTorch on the CPU, for the workload of configs/speed-10m.ini, next to braid's.

  speed_torch.py                       time PyTorch alone
  speed_torch.py --profile             and show which operators the time goes to
  speed_torch.py --braid build/braid   time both in turns and print braid / PyTorch

The PyTorch side is what a careful user writes: eager mode, fp32, fused QKV and gate-up matrices,
F.scaled_dot_product_attention, nn.RMSNorm, gradient clipping and AdamW, once with its default
(foreach) and once with its fused update; the faster of the two counts. Both sides do the whole
step: forward, backward, clipping, update. Turns alternate, so that a busy machine hits both alike;
still, other busy processes can make a step several times slower. Trust medians only when they are
near the best turns.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from parity_torch import read_options

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.heads, self.dim = o["model.heads"], o["model.head_dim"]
        self.norm = nn.RMSNorm(o["model.hidden"], eps=o["model.norm_eps"])
        self.qkv = nn.Linear(o["model.hidden"], 3 * self.heads * self.dim, bias=False)
        self.proj = nn.Linear(self.heads * self.dim, o["model.hidden"], bias=False)

    def forward(self, x, cos, sin):
        batch, seq, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, self.dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.norm = nn.RMSNorm(o["model.hidden"], eps=o["model.norm_eps"])
        self.fc1 = nn.Linear(o["model.hidden"], 2 * o["model.ffn"], bias=False)
        self.fc2 = nn.Linear(o["model.ffn"], o["model.hidden"], bias=False)

    def forward(self, x, cos, sin):
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, o):
        super().__init__()
        kinds = {"*": Attention, "-": MLP}
        self.embed = nn.Embedding(o["model.vocab"], o["model.hidden"])
        self.layers = nn.ModuleList(kinds[symbol](o) for symbol in o["model.pattern"])
        self.norm = nn.RMSNorm(o["model.hidden"], eps=o["model.norm_eps"])
        self.head = nn.Linear(o["model.hidden"], o["model.vocab"], bias=False)
        half = o["model.head_dim"] // 2
        freq = o["model.rope_base"] ** (-torch.arange(half) / half)
        angle = torch.arange(o["train.seq"])[:, None] * freq
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=o["model.init_std"])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Trainer:
    def __init__(self, o, fused):
        torch.manual_seed(1)
        self.o = o
        self.model = Model(o)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": o["train.weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (o["train.beta1"], o["train.beta2"])
        self.adam = torch.optim.AdamW(
            groups, lr=o["train.lr"], betas=betas, eps=o["train.eps"], fused=fused or None
        )
        shape = (8, o["train.micro_batch"], o["train.seq"] + 1)
        self.data = torch.randint(0, o["model.vocab"], shape)
        self.at = 0

    def step(self):
        batch = self.data[self.at % len(self.data)]
        self.at += 1
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.o["train.clip"])
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return loss.item()

    def times(self, steps):
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        return seconds


def step_flops(o):
    """Floating-point operations of one step: 6 per matrix weight and token, and causal attention
    with its masked half not counted. Backward counts as two forwards."""
    width = o["model.heads"] * o["model.head_dim"]
    attention = 4 * o["model.hidden"] * width
    mlp = 3 * o["model.hidden"] * o["model.ffn"]
    weights = o["model.hidden"] * o["model.vocab"]
    weights += sum({"*": attention, "-": mlp}[symbol] for symbol in o["model.pattern"])
    scores = 3 * o["model.pattern"].count("*") * 2 * o["train.seq"] * width
    return o["train.micro_batch"] * o["train.seq"] * (6 * weights + scores)


def check_supported(o):
    """Refuse workloads that the model above does not describe."""
    expected = {
        "model.kv_heads": o["model.heads"], "model.act": "swiglu", "model.tied": False,
        "model.rope": "half", "model.rope_percent": 1.0, "model.rope_scaling": "none",
        "model.bias": False, "model.qkv_bias": False, "model.qk_norm": False,
        "model.attn_gate": False, "model.attn_window": 0, "model.attn_sink": "none",
        "model.norm_zero_centered": False, "model.dropout": 0.0, "model.act_clamp": 0.0,
        "train.global_batch": o["train.micro_batch"],
    }  # fmt: skip
    wrong = [f"{name} = {o[name]}" for name, value in expected.items() if o[name] != value]
    if wrong or set(o["model.pattern"]) - set("*-"):
        sys.exit("speed_torch.py: its model cannot do " + (", ".join(wrong) or "this pattern"))


def line(name, seconds, o):
    tokens, best = o["train.micro_batch"] * o["train.seq"], min(seconds)
    median = statistics.median(seconds)
    print(
        f"{name:16} {tokens / median:10.0f} {tokens / best:10.0f} {1e3 * median:10.1f}"
        f" {1e3 * best:10.1f} {step_flops(o) / median / 1e9:10.1f}"
        f" {step_flops(o) / best / 1e9:10.1f}",
        flush=True,
    )
    return tokens / median


def braid_speed(args):
    command = [args.braid, "bench", "train", args.config, f"--train.steps={args.steps}"]
    command.append(f"--run.threads={args.threads}")
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^tokens_per_second:\s*([0-9.eE+]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not found:
        print(done.stdout, done.stderr, file=sys.stderr)
        sys.exit(f"speed_torch.py: exit code {done.returncode} from {' '.join(command)}")
    return float(found.group(1))


def profile(trainer, steps):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            trainer.step()
    table = recorded.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=48
    )
    print(f"\nwhere the time of {steps} steps goes:\n{table}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=os.path.join(ROOT, "configs", "speed-10m.ini"))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--braid", metavar="PATH", help="the braid program to compare with")
    parser.add_argument("--profile", action="store_true", help="break PyTorch's time down")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    o = read_options(args.config, [])
    check_supported(o)

    trainers = {"torch foreach": Trainer(o, fused=False), "torch fused": Trainer(o, fused=True)}
    count = sum(p.numel() for p in trainers["torch fused"].model.parameters())
    print(
        f"torch {torch.__version__}, {args.threads} threads, {count / 1e6:.2f} M parameters, "
        f"{o['train.micro_batch'] * o['train.seq']} tokens and "
        f"{step_flops(o) / 1e9:.1f} GFLOP a step"
    )
    for trainer in trainers.values():
        trainer.times(3)  # warm up

    print(f"{'':16} {'tokens/s':>21} {'ms/step':>21} {'GFLOP/s':>21}")
    print(f"{'':16}" + 3 * f" {'median':>10} {'best':>10}")
    turns = {name: [] for name in trainers}
    braid_turns = []
    for i in range(args.rounds):
        for name, trainer in trainers.items():
            turns[name].append(trainer.times(args.steps))
            line(f"{name} {i + 1}", turns[name][-1], o)
        if args.braid:
            time.sleep(0.5)  # lets the idle threads of PyTorch stop spinning
            braid_turns.append(braid_speed(args))
            print(f"braid {i + 1:<10} {braid_turns[-1]:10.0f}", flush=True)

    print("all turns")
    speeds = [line(name, sum(turns[name], []), o) for name in trainers]
    if args.braid:
        # braid prints one number for a whole turn, so whole turns are compared.
        tokens = o["train.micro_batch"] * o["train.seq"]
        rates = [[tokens * len(turn) / sum(turn) for turn in turns[name]] for name in trainers]
        for word, pick in (("median", statistics.median), ("best", max)):
            ours, theirs = pick(braid_turns), max(pick(rate) for rate in rates)
            print(f"{word} turn, braid / torch: {ours:.0f} / {theirs:.0f} = {ours / theirs:.3f}")
    else:
        print(f"torch: {max(speeds):.0f} tokens/s")
    if args.profile:
        profile(trainers["torch fused"], 3)


if __name__ == "__main__":
    main()
