#!/usr/bin/env python3
"""Text made by braid and by PyTorch on one GPU, in one run: a prompt is read, then tokens are made one by one.

    tools/speed_generate.py [--braid build/braid] [--config configs/h200/dense-1b.ini] [--batch 1,64] [--prompt 512] [--tokens 128]

PyTorch's side has the same shapes (attention and SwiGLU layers with rotary positions, RMSNorm, untied head) in bf16 with a static
cache, compiled with CUDA graphs (`mode="reduce-overhead"`), attention by scaled_dot_product_attention, the likeliest token chosen on the GPU. Turns alternate.
"Share" is bytes of weights and caches over the time of a step, against the copy rate that braid measures.
--device cpu and small sizes try the script without a GPU."""
import argparse
import configparser
import json
import statistics
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


class Cache:
    """Keys and values of one layer, [batch, heads, length, channels]."""

    def __init__(self, batch, heads, length, channels, device):
        shape = (batch, heads, length, channels)
        self.k = torch.zeros(shape, device=device, dtype=DTYPE[device])
        self.v = torch.zeros(shape, device=device, dtype=DTYPE[device])
        for t in (self.k, self.v):  # without this, tensors that a graph writes keep it from being captured
            torch._dynamo.mark_static_address(t)


class Layer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.heads, self.kv_heads, self.channels = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.channels, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(hidden)) for _ in range(2)])

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x, at, cos, sin, mask, cache):
        batch, n, hidden = x.shape
        h = F.rms_norm(x, (hidden,), self.norms[0], 1e-5)
        q, k, v = self.qkv(h).view(batch, n, -1, self.channels).transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
        cache.k.index_copy_(2, at, self.rotate(k, cos, sin))
        cache.v.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(self.rotate(q, cos, sin), cache.k, cache.v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(y.transpose(1, 2).reshape(batch, n, hidden))
        gate, up = self.up(F.rms_norm(x, (hidden,), self.norms[1], 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, m, length, device):
        super().__init__()
        hidden, heads = int(m["hidden"]), int(m["heads"])
        self.embed = nn.Embedding(int(m["vocab"]), hidden)
        kv_heads = int(m.get("kv_heads", heads))
        self.layers = nn.ModuleList([Layer(hidden, heads, kv_heads, int(m["ffn"])) for _ in range(m["pattern"].count("*"))])
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = nn.Linear(hidden, int(m["vocab"]), bias=False)
        half = hidden // heads // 2
        angle = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("places", torch.arange(length))
        self.to(device=device, dtype=DTYPE[device])
        self.places = torch.arange(length, device=device)

    def forward(self, ids, at, caches):
        x = self.embed(ids)
        mask = self.places[None, :] <= at[:, None]
        for layer, cache in zip(self.layers, caches):
            x = layer(x, at, self.cos[at], self.sin[at], mask, cache)
        return self.head(F.rms_norm(x[:, -1], (x.shape[-1],), self.norm, 1e-5)).argmax(-1, keepdim=True)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def torch_turn(model, step, batch, prompt, tokens, vocab, device):
    """Milliseconds of a token, median."""
    heads, channels = model.layers[0].kv_heads, model.layers[0].channels
    caches = [Cache(batch, heads, len(model.places), channels, device) for _ in model.layers]
    ids = model(torch.randint(vocab, (batch, prompt), device=device), model.places[:prompt], caches)
    times = []
    for i in range(tokens):
        at = torch.tensor([prompt + i], device=device)
        wait(device)
        begin = time.perf_counter()
        ids = step(ids, at, caches).clone()
        wait(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[3:])


def braid_turn(a, batch):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [a.braid, "bench", "generate", a.config, f"--prompt={a.prompt}", f"--generate.tokens={a.tokens}",
                   f"--generate.batch={batch}", f"--json={out.name}", f"--run.device={a.device}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.load(open(out.name))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--braid", default="build/braid")
    p.add_argument("--config", default="configs/h200/dense-1b.ini")
    p.add_argument("--batch", default="1,64")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    a = p.parse_args()
    ini = configparser.ConfigParser()
    ini.read(a.config)
    m = ini["model"]
    if m["pattern"].strip("*-"):
        raise SystemExit(f"{a.config}: PyTorch's side has attention and MLP layers only, the pattern is {m['pattern']}")
    torch.manual_seed(0)
    model = Model(m, a.prompt + a.tokens, a.device)
    print(f"{'batch':>5} {'turn':>4} {'braid ms':>9} {'sampling':>9} {'share':>7} {'torch ms':>9} {'ratio':>6}")
    for batch in (int(b) for b in a.batch.split(",")):
        step = torch.compile(model, mode="reduce-overhead") if a.device == "cuda" else model
        for turn in range(a.rounds):
            ours = braid_turn(a, batch)
            theirs = torch_turn(model, step, batch, a.prompt, a.tokens, int(m["vocab"]), a.device)
            share = ours["bytes_per_step"] / ours["step_ms"] * 1e3 / ours["copy_bytes_per_second"]
            whole = ours["step_ms"] + ours["sampling_ms"]
            print(f"{batch:5d} {turn + 1:4d} {ours['step_ms']:9.3f} {ours['sampling_ms']:9.3f} {share:7.1%} {theirs:9.3f} {theirs / whole:6.2f}", flush=True)


if __name__ == "__main__":
    main()
