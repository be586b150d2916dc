#!/usr/bin/env python3
"""A whole training step in PyTorch, with braid_kernels in place of PyTorch's own code, and without: what the kernels are worth to a user.

    tools/speed_kernels.py PATTERN [--mhc none|eager|te|braid] [--experts grouped_mm|expert_mlp|moe_mlp] [--compile regions|whole|no]

PATTERN is a letter for each sublayer: * attention, - MLP, E mixture of experts. bf16 autocast over fp32 weights, cuDNN attention, fused AdamW.
Several of --mhc or --experts, with commas between them, run one behind the other on the same GPU, so that they may be compared.
te: Transformer Engine's Triton kernels, from a folder that PEERS names: it has transformer_engine/{common,pytorch}/triton of the public source, and in
place of transformer_engine.pytorch.cpp_extensions.gemm one that makes the only product they leave to cuBLAS with torch.matmul. All their
configurations are tried, in the first step; those that Triton has in its cache already are not compiled again.
regions: every sublayer is compiled, once for all of its kind; whole: the model as one graph, which takes minutes to compile. Prints the median
step, tokens a second and the peak of memory; --steps 20 and more for numbers that are to be quoted."""

import argparse
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16


def some_of(*known):
    def parse(text):
        for part in text.split(","):
            if part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
        return text

    return parse


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("pattern")
    ap.add_argument("--mhc", default="none", type=some_of("none", "eager", "te", "braid"))
    ap.add_argument("--experts", default="grouped_mm", type=some_of("grouped_mm", "expert_mlp", "moe_mlp"))
    ap.add_argument("--compile", default="regions", choices=["regions", "whole", "no"])
    for name, value in dict(hidden=2048, heads=16, ffn=5632, n_experts=64, topk=8, effn=1024, seq=4096, mb=4, vocab=50304, steps=10).items():
        ap.add_argument("--" + name, type=int, default=value)
    return ap.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads, self.d = a.heads, a.hidden // a.heads
        self.qkv = nn.Linear(a.hidden, 3 * a.hidden, bias=False)
        self.out = nn.Linear(a.hidden, a.hidden, bias=False)
        turns = torch.outer(torch.arange(a.seq).float(), 1e4 ** (-torch.arange(0, self.d // 2).float() / (self.d // 2)))
        self.register_buffer("cos", turns.cos().to(BF16), persistent=False)
        self.register_buffer("sin", turns.sin().to(BF16), persistent=False)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, -1, self.d).transpose(1, 2).split([self.heads] * 3, 1)
        y = F.scaled_dot_product_attention(rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.up, self.down = nn.Linear(a.hidden, 2 * a.ffn, bias=False), nn.Linear(a.ffn, a.hidden, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    """The layouts of weights are what each implementation wants: [E, in, 2f] for grouped_mm, [E, 2f, in] for braid."""

    def __init__(self, a):
        super().__init__()
        self.topk, self.n, self.braid = a.topk, a.n_experts, a.experts != "grouped_mm"
        self.whole = a.experts == "moe_mlp"
        self.router = nn.Linear(a.hidden, a.n_experts, bias=False)
        up, down = (a.n_experts, a.hidden, 2 * a.effn), (a.n_experts, a.effn, a.hidden)
        turn = (lambda s: (s[0], s[2], s[1])) if self.braid else (lambda s: s)
        self.w1, self.w2 = nn.Parameter(torch.empty(turn(up))), nn.Parameter(torch.empty(turn(down)))

    def forward(self, x):
        t = x.reshape(-1, x.shape[-1])
        with torch.autocast("cuda", enabled=False):
            score = F.linear(t.float(), self.router.weight).softmax(-1)
        p, i = score.topk(self.topk, -1)
        if self.braid:
            import braid_kernels as bk
        if self.whole:
            return bk.moe_mlp(t, i, p, self.w1, self.w2).view_as(x)
        flat = i.reshape(-1)
        order = flat.argsort(stable=True)
        token, p = order // self.topk, p.reshape(-1)[order]
        ends = torch.bincount(flat, minlength=self.n).cumsum(0).to(torch.int32)
        if self.braid:
            y = bk.expert_mlp(t[token], self.w1, self.w2, bk.offsets_of_ends(ends), p)
            return torch.zeros_like(t).index_add_(0, token, y).view_as(x)
        gm = getattr(F, "grouped_mm", None) or torch._grouped_mm
        gate, up = gm(t[token], self.w1.to(BF16), offs=ends).chunk(2, -1)
        y = gm((F.silu(gate.float()) * up.float() * p.unsqueeze(-1)).to(BF16), self.w2.to(BF16), offs=ends)
        return torch.zeros_like(t).index_add_(0, token, y).view_as(x)


def transformer_engine():
    """Its mHC: u, post, comb = open(x, fn, scale, base), x = close(f, bias, post, x, comb, 4); or an error that says what is missing."""
    sys.path.insert(0, os.environ.get("PEERS", ""))
    try:
        from transformer_engine.pytorch.triton import mhc
    except ImportError as e:
        raise SystemExit(f"--mhc te needs Transformer Engine: PEERS names no folder that has it ({e})") from None
    finally:
        sys.path.pop(0)
    return torch.compiler.disable(mhc.mhc_generate_mix_and_aggregate), torch.compiler.disable(mhc.mhc_fused_expand_combine)


class HC(nn.Module):
    """fn has a row for each coefficient; its columns go by stream, then channel, but for Transformer Engine by channel, then stream."""

    def __init__(self, a):
        super().__init__()
        self.te = transformer_engine() if a.mhc == "te" else None
        self.fn, self.base, self.scale = nn.Parameter(torch.empty(24, 4 * a.hidden)), nn.Parameter(torch.zeros(24)), nn.Parameter(torch.full((3,), 0.01))
        nn.init.xavier_uniform_(self.fn)

    def pre(self, x):
        """Eager: u, post, comb."""
        flat = x.flatten(2)
        with torch.autocast("cuda", enabled=False):
            z = F.linear(flat, self.fn.to(BF16)).float() * (flat.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        z = z * torch.cat([self.scale[0].expand(4), self.scale[1].expand(4), self.scale[2].expand(16)]) + self.base
        m = z[..., 8:].unflatten(-1, (4, 4)).softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        pre = z[..., :4].sigmoid() + 1e-6
        return (x * pre.to(BF16).unsqueeze(-1)).sum(2), 2 * z[..., 4:8].sigmoid().to(BF16), m.to(BF16)

    def around(self, f, x):
        """A sublayer f of streams x [..., channels, 4] with Transformer Engine's kernels."""
        open, close = self.te
        u, post, comb = open(x, self.fn, self.scale, self.base.view(1, 24))
        return close(f(u), None, post, x, comb, 4)


class Layer(nn.Module):
    def __init__(self, a, kind):
        super().__init__()
        self.norm = RMSNorm(a.hidden)
        self.f = {"*": Attention, "-": MLP, "E": MoE}[kind](a)
        self.hc = HC(a) if a.mhc != "none" else None

    def normed(self, u):
        return self.f(self.norm(u))

    def forward(self, x):
        """Without braid's kernels; x is the stream, or the streams."""
        if self.hc is None:
            return x + self.f(self.norm(x))
        if self.hc.te is not None:
            return self.hc.around(self.normed, x)
        u, post, comb = self.hc.pre(x)
        f = self.normed(u)
        return torch.einsum("bsji,bsjc->bsic", comb, x) + post.unsqueeze(-1) * f.unsqueeze(2)

    def params(self):
        return self.hc.fn, self.hc.base, self.hc.scale, self.norm.weight


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.mhc, self.vocab = a.mhc, a.vocab
        self.embed, self.out = nn.Embedding(a.vocab, a.hidden), nn.Linear(a.hidden, a.vocab, bias=False)
        self.layers = nn.ModuleList([Layer(a, kind) for kind in a.pattern])
        self.norm = RMSNorm(a.hidden)
        for name, p in self.named_parameters():
            if p.dim() > 1 and ".hc." not in name:
                nn.init.normal_(p, 0, 0.02)

    def head(self, x, labels):
        if self.mhc != "none":
            x = x.mean(3 if self.mhc == "te" else 2)
        return F.cross_entropy(self.out(self.norm(x)).float().view(-1, self.vocab), labels.reshape(-1))

    def chain(self, x):
        """Through all layers with one boundary between two sublayers."""
        import braid_kernels as bk

        h, coef = bk.mhc_pre_coef(x, *self.layers[0].params(), norm_eps=1e-5, root_eps=1e-6)
        for before, after in zip(self.layers, self.layers[1:]):
            x, h, coef = bk.mhc_boundary_coef(x, before.f(h), coef, *after.params(), norm_eps=1e-5, root_eps=1e-6)
        return bk.mhc_post_coef(x, self.layers[-1].f(h), coef)

    def forward(self, tokens, labels):
        x = self.embed(tokens).to(BF16)
        if self.mhc == "te":
            x = x.unsqueeze(3).expand(-1, -1, -1, 4).contiguous()
        elif self.mhc != "none":
            x = x.unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        if self.mhc == "braid":
            x = self.chain(x)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x, labels)


def compiled(a, model):
    if a.compile == "whole":
        return torch.compile(model)
    if a.compile == "regions":
        model.head = torch.compile(model.head)
        for layer in model.layers:
            if a.mhc == "braid":
                layer.f.compile()
            elif a.mhc == "te":  # its kernels are called from Python, as the compiler cannot look into them
                layer.normed = torch.compile(layer.normed)
            else:
                layer.compile()
    return model


def measure(a):
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = Model(a)
    n = sum(p.numel() for p in model.parameters())
    step = compiled(a, model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    t = torch.randint(0, a.vocab, (a.mb, a.seq + 1), device="cuda")
    times, begun = [], time.time()
    for _ in range(a.steps):
        torch.cuda.synchronize()
        begin = time.time()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.autocast("cuda", BF16):
            loss = step(t[:, :-1].contiguous(), t[:, 1:].contiguous())
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.time() - begin)
    ms = sorted(times[3:])[len(times[3:]) // 2] * 1e3
    print(
        f"{a.pattern} mhc {a.mhc}, experts {a.experts}, compile {a.compile}: {n / 1e9:.3f} B parameters, loss {loss.item():.3f}, step {ms:.1f} ms "
        f"({min(times[3:]) * 1e3:.1f} to {max(times[3:]) * 1e3:.1f}), {a.mb * a.seq / ms * 1e3:.0f} tokens/s, "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {time.time() - begun:.0f} s in all",
        flush=True,
    )


def main():
    a = arguments()
    if "te" in a.mhc.split(","):
        transformer_engine()
    if not torch.cuda.is_available():
        raise SystemExit("speed_kernels needs a GPU that torch sees")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    for mhc in a.mhc.split(","):
        for experts in a.experts.split(","):
            measure(argparse.Namespace(**{**vars(a), "mhc": mhc, "experts": experts}))
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
