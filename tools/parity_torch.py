#!/usr/bin/env python3
"""Compare loss, logits and gradients of braid with a model written independently in PyTorch.

  parity_torch.py                      all cases, on braid's cpu device
  parity_torch.py --device ref         all cases, on its double-precision reference device
  parity_torch.py --trained            on weights of a short training run instead of fresh ones,
                                       where biases, norms and sinks are not 0 or 1
  parity_torch.py --case yarn --case gqa
  parity_torch.py --self-test          check this script itself, without braid

Each case is configs/tiny.ini with a few options changed. `braid grads` computes it for random
tokens and writes its parameters, which the PyTorch model takes over. That model is meant to be
read, not to be fast: one head at a time, masks written out, autograd for the backward pass.
braid is measured against the model in float64; the columns "torch" show how far the same model in
float32 is from that, which is the error that rounding alone makes.
"""
import argparse
import configparser
import math
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ---- options -----------------------------------------------------------------------------------

# The options this model knows, with braid's defaults; a default also gives the type.
DEFAULTS = {
    "model.pattern": "*-*-", "model.hidden": 320, "model.heads": 5, "model.kv_heads": 0,
    "model.head_dim": 0, "model.ffn": 0, "model.vocab": 0, "model.vocab_multiple": 1,
    "model.act": "swiglu", "model.act_clamp": 0.0, "model.act_alpha": 1.702,
    "model.act_offset": 0.0, "model.norm_eps": 1e-5, "model.norm_zero_centered": False,
    "model.qk_norm": False, "model.attn_gate": False, "model.attn_window": 0,
    "model.attn_window_skip": 0, "model.attn_sink": "none", "model.softmax_scale": 0.0,
    "model.qkv_bias": False, "model.bias": False, "model.rope": "half",
    "model.rope_base": 10000.0, "model.rope_percent": 1.0, "model.rope_scaling": "none",
    "model.rope_factor": 1.0, "model.rope_original": 4096, "model.rope_low": 1.0,
    "model.rope_high": 4.0, "model.rope_beta_fast": 32.0, "model.rope_beta_slow": 1.0,
    "model.rope_mscale": 0.0, "model.rope_mscale_all_dim": 0.0, "model.no_rope_freq": 0,
    "model.tied": True, "model.init_std": 0.02, "model.dropout": 0.0,
    "train.seq": 256, "train.micro_batch": 16, "train.global_batch": 0, "train.z_loss": 0.0,
    "train.lr": 1e-3, "train.beta1": 0.9, "train.beta2": 0.95, "train.eps": 1e-8,
    "train.weight_decay": 0.1, "train.clip": 1.0,
}  # fmt: skip

GATED = ("swiglu", "geglu", "quick_geglu")


def parse_value(name, text):
    kind = type(DEFAULTS[name])
    if kind is bool:
        return {"on": True, "off": False}[text]
    return kind(text)


def read_options(path, overrides):
    """Options of a config file with `section.key=value` overrides, defaults and derived values."""
    parser = configparser.ConfigParser(
        delimiters=("=",), interpolation=None, inline_comment_prefixes=(";",)
    )
    with open(path, encoding="utf-8") as f:
        parser.read_file(f)
    texts = {f"{s}.{key}": text for s in parser.sections() for key, text in parser.items(s)}
    texts.update(item.split("=", 1) for item in overrides)
    o = dict(DEFAULTS)
    for name, text in texts.items():
        if name in DEFAULTS:
            o[name] = parse_value(name, text)
        elif name.startswith("model."):
            sys.exit(f"parity_torch.py: the option {name} is unknown to the PyTorch model")

    gated = o["model.act"] in GATED
    o["model.kv_heads"] = o["model.kv_heads"] or o["model.heads"]
    o["model.head_dim"] = o["model.head_dim"] or o["model.hidden"] // o["model.heads"]
    third = -(-8 * o["model.hidden"] // 3)
    o["model.ffn"] = o["model.ffn"] or (-(-third // 32) * 32 if gated else 4 * o["model.hidden"])
    multiple = o["model.vocab_multiple"]
    o["model.vocab"] = -(-(o["model.vocab"] or 256) // multiple) * multiple
    o["model.softmax_scale"] = o["model.softmax_scale"] or o["model.head_dim"] ** -0.5
    o["train.global_batch"] = o["train.global_batch"] or o["train.micro_batch"]
    return o


def parameter_shapes(o):
    """Key and shape of every parameter the configured model has."""
    d, hd, nh, ng = (o["model." + n] for n in ("hidden", "head_dim", "heads", "kv_heads"))
    qkv_rows = (nh * (2 if o["model.attn_gate"] else 1) + 2 * ng) * hd
    fc1_rows = o["model.ffn"] * (2 if o["model.act"] in GATED else 1)
    shapes = {"embedding.word_embeddings.weight": (o["model.vocab"], d)}
    for i, symbol in enumerate(o["model.pattern"]):
        at = f"decoder.layers.{i}."
        if symbol == "*":
            shapes[at + "self_attention.linear_qkv.layer_norm_weight"] = (d,)
            shapes[at + "self_attention.linear_qkv.weight"] = (qkv_rows, d)
            if o["model.qkv_bias"] or o["model.bias"]:
                shapes[at + "self_attention.linear_qkv.bias"] = (qkv_rows,)
            if o["model.qk_norm"]:
                shapes[at + "self_attention.q_layernorm.weight"] = (hd,)
                shapes[at + "self_attention.k_layernorm.weight"] = (hd,)
            if o["model.attn_sink"] == "learnable":
                shapes[at + "self_attention.core_attention.softmax_offset"] = (nh,)
            shapes[at + "self_attention.linear_proj.weight"] = (d, nh * hd)
            if o["model.bias"]:
                shapes[at + "self_attention.linear_proj.bias"] = (d,)
        elif symbol == "-":
            shapes[at + "mlp.linear_fc1.layer_norm_weight"] = (d,)
            shapes[at + "mlp.linear_fc1.weight"] = (fc1_rows, d)
            shapes[at + "mlp.linear_fc2.weight"] = (d, o["model.ffn"])
            if o["model.bias"]:
                shapes[at + "mlp.linear_fc1.bias"] = (fc1_rows,)
                shapes[at + "mlp.linear_fc2.bias"] = (d,)
        else:
            sys.exit(f"parity_torch.py: the PyTorch model has no layer '{symbol}'")
    shapes["decoder.final_norm.weight"] = (d,)
    if not o["model.tied"]:
        shapes["output_layer.weight"] = (o["model.vocab"], d)
    return shapes


# ---- the model ---------------------------------------------------------------------------------


def rms_norm(o, x, weight):
    if o["model.norm_zero_centered"]:
        weight = 1 + weight
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + o["model.norm_eps"]) * weight


def linear(x, weight, bias):
    y = x @ weight.T
    return y if bias is None else y + bias


def rope_dim(o):
    return int(o["model.head_dim"] * o["model.rope_percent"])


def llama3_frequency(o, w):
    wavelength = 2 * math.pi / w
    length, low, high = o["model.rope_original"], o["model.rope_low"], o["model.rope_high"]
    if wavelength > length / low:
        return w / o["model.rope_factor"]
    if wavelength < length / high:
        return w
    t = (length / wavelength - low) / (high - low)
    return (1 - t) * w / o["model.rope_factor"] + t * w


def yarn_frequency(o, w, k):
    dim, base, length = rope_dim(o), o["model.rope_base"], o["model.rope_original"]

    def channel_with_turns(n):
        return dim * math.log(length / (2 * math.pi * n)) / (2 * math.log(base))

    low = max(math.floor(channel_with_turns(o["model.rope_beta_fast"])), 0)
    high = min(math.ceil(channel_with_turns(o["model.rope_beta_slow"])), dim - 1)
    if high == low:
        high += 0.001
    keep = 1 - min(max((k - low) / (high - low), 0), 1)
    return w / o["model.rope_factor"] * (1 - keep) + w * keep


def yarn_magnitude(o):
    s, mscale, all_dim = (o["model.rope_" + n] for n in ("factor", "mscale", "mscale_all_dim"))
    if s <= 1:
        return 1.0
    if mscale == 0 and all_dim == 0:
        return 0.1 * math.log(s) + 1
    return (0.1 * mscale * math.log(s) + 1) / (0.1 * all_dim * math.log(s) + 1)


def rope_angles(o, seq):
    """Angle of pair k at each position [seq, pairs], and the factor on its cosine and sine."""
    dim, scaling = rope_dim(o), o["model.rope_scaling"]
    frequencies, magnitude = [], 1.0
    for k in range(dim // 2):
        w = o["model.rope_base"] ** (-2 * k / dim)
        if scaling == "linear":
            w = w / o["model.rope_factor"]
        elif scaling == "llama3":
            w = llama3_frequency(o, w)
        elif scaling == "yarn":
            w = yarn_frequency(o, w, k)
        frequencies.append(w)
    if scaling == "yarn":
        magnitude = yarn_magnitude(o)
    positions = torch.arange(seq, dtype=torch.float64)
    return positions[:, None] * torch.tensor(frequencies, dtype=torch.float64), magnitude


def apply_rope(o, x):
    """x [batch, seq, head_dim]: rotate each pair of the first rope_dim channels."""
    angles, magnitude = rope_angles(o, x.shape[1])
    cos = (angles.cos() * magnitude).to(x.dtype)
    sin = (angles.sin() * magnitude).to(x.dtype)
    dim = rope_dim(o)
    channels = list(x.unbind(-1))
    for k in range(dim // 2):
        a, b = (k, k + dim // 2) if o["model.rope"] == "half" else (2 * k, 2 * k + 1)
        first, second = channels[a], channels[b]
        channels[a] = first * cos[:, k] - second * sin[:, k]
        channels[b] = second * cos[:, k] + first * sin[:, k]
    return torch.stack(channels, -1)


def attention_mask(o, seq, number):
    """[seq, seq], True where query i sees key j. number counts attention layers from 1."""
    window, skip = o["model.attn_window"], o["model.attn_window_skip"]
    if skip > 0 and number % skip == 0:
        window = 0
    mask = torch.zeros(seq, seq, dtype=torch.bool)
    for i in range(seq):
        for j in range(i + 1):
            mask[i, j] = window == 0 or i - j < window
    return mask


def softmax_with_sink(scores, sink):
    """Softmax over the last axis of [batch, seq, seq], with one more logit that takes no value."""
    if sink is None:
        return torch.softmax(scores, -1)
    column = sink.expand(scores.shape[0], scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def split_qkv(o, rows):
    """[batch, seq, qkv_rows] to lists of heads q, gate, k, v; each group has its q heads, then
    their gates, then one k and one v."""
    hd, nh, ng = (o["model." + n] for n in ("head_dim", "heads", "kv_heads"))
    heads = iter(rows.split(hd, -1))
    q, gate, k, v = [], [], [], []
    for _ in range(ng):
        q += [next(heads) for _ in range(nh // ng)]
        if o["model.attn_gate"]:
            gate += [next(heads) for _ in range(nh // ng)]
        k.append(next(heads))
        v.append(next(heads))
    return q, gate, k, v


def attention(o, p, at, x, number):
    at += "self_attention."
    x = rms_norm(o, x, p[at + "linear_qkv.layer_norm_weight"])
    rows = linear(x, p[at + "linear_qkv.weight"], p.get(at + "linear_qkv.bias"))
    q, gate, k, v = split_qkv(o, rows)
    if o["model.qk_norm"]:
        q = [rms_norm(o, head, p[at + "q_layernorm.weight"]) for head in q]
        k = [rms_norm(o, head, p[at + "k_layernorm.weight"]) for head in k]
    freq = o["model.no_rope_freq"]
    if o["model.rope"] != "none" and not (freq > 0 and number % freq == 0):
        q = [apply_rope(o, head) for head in q]
        k = [apply_rope(o, head) for head in k]

    mask = attention_mask(o, x.shape[1], number)
    outputs = []
    for h in range(o["model.heads"]):
        group = h // (o["model.heads"] // o["model.kv_heads"])
        scores = q[h] @ k[group].transpose(1, 2) * o["model.softmax_scale"]
        scores = scores.masked_fill(~mask, -math.inf)
        sink = None
        if o["model.attn_sink"] == "learnable":
            sink = p[at + "core_attention.softmax_offset"][h]
        elif o["model.attn_sink"] == "off_by_one":
            sink = torch.zeros((), dtype=x.dtype)
        y = softmax_with_sink(scores, sink) @ v[group]
        if o["model.attn_gate"]:
            y = y * torch.sigmoid(gate[h])
        outputs.append(y)
    y = torch.cat(outputs, -1)
    return linear(y, p[at + "linear_proj.weight"], p.get(at + "linear_proj.bias"))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activation(o, x):
    kind, clamp, alpha = o["model.act"], o["model.act_clamp"], o["model.act_alpha"]
    functions = {
        "swiglu": lambda t: t * torch.sigmoid(t),
        "silu": lambda t: t * torch.sigmoid(t),
        "geglu": gelu_tanh,
        "gelu": gelu_tanh,
        "quick_geglu": lambda t: t * torch.sigmoid(alpha * t),
        "quick_gelu": lambda t: t * torch.sigmoid(alpha * t),
        "relu2": lambda t: torch.where(t > 0, t * t, torch.zeros_like(t)),
    }
    if kind not in GATED:
        return functions[kind](x)
    gate, up = x.split(o["model.ffn"], -1)
    if clamp > 0:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return functions[kind](gate) * (up + o["model.act_offset"])


def mlp(o, p, at, x):
    at += "mlp."
    x = rms_norm(o, x, p[at + "linear_fc1.layer_norm_weight"])
    x = linear(x, p[at + "linear_fc1.weight"], p.get(at + "linear_fc1.bias"))
    return linear(activation(o, x), p[at + "linear_fc2.weight"], p.get(at + "linear_fc2.bias"))


def compute_logits(o, p, tokens):
    """tokens [batch, seq] to logits [batch, seq, vocab]."""
    embedding = p["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    number = 0
    for i, symbol in enumerate(o["model.pattern"]):
        at = f"decoder.layers.{i}."
        if symbol == "*":
            number += 1
            x = x + attention(o, p, at, x, number)
        else:
            x = x + mlp(o, p, at, x)
    x = rms_norm(o, x, p["decoder.final_norm.weight"])
    return x @ (embedding if o["model.tied"] else p["output_layer.weight"]).T


def compute_losses(o, logits, labels):
    """The mean cross entropy of the labels >= 0, and what is differentiated: that and z-loss."""
    logits, labels = logits.flatten(0, 1), labels.flatten().long()
    rows = torch.nonzero(labels >= 0).flatten()
    lse = torch.logsumexp(logits[rows], -1)
    loss = (lse - logits[rows, labels[rows]]).sum() / len(rows)
    return loss, loss + o["train.z_loss"] * (lse * lse).sum() / len(rows)


def run_model(o, params, tokens, labels, dtype):
    """Everything `braid grads` computes: {loss, logits, grad.<key>}."""
    p = {key: value.detach().to(dtype).requires_grad_() for key, value in params.items()}
    logits = compute_logits(o, p, tokens.long())
    loss, objective = compute_losses(o, logits, labels)
    objective.backward()
    result = {"loss": loss.detach().reshape(1), "logits": logits.detach().flatten(0, 1)}
    result.update({"grad." + key: value.grad for key, value in p.items()})
    return result


# ---- comparison --------------------------------------------------------------------------------

# Largest relative errors allowed per device: of the loss, and of the norms of logits and gradients.
TOLERANCE = {"cpu": (1e-6, 1e-4), "ref": (1e-12, 1e-9), "cuda": (1e-6, 1e-4)}


def relative_error(found, expected, floor):
    expected = expected.double()
    difference = torch.linalg.vector_norm(found.double() - expected).item()
    return difference / max(torch.linalg.vector_norm(expected).item(), floor)


def worst_errors(found, expected):
    """Error of the loss, the largest of logits and gradients, and whose that is."""
    loss = relative_error(found["loss"], expected["loss"], 1e-300)
    grads = [value.double() for key, value in expected.items() if key.startswith("grad.")]
    whole = math.sqrt(sum(torch.linalg.vector_norm(g).item() ** 2 for g in grads))
    worst, worst_key = -1.0, ""
    for key, value in expected.items():
        if key == "loss":
            continue
        # A gradient that is almost nothing of the whole is measured against a bit of the whole.
        error = relative_error(found[key], value, 1e-6 * whole + 1e-300)
        if not error <= worst:  # also when it is not a number
            worst, worst_key = error, key
        if math.isnan(error):
            break
    return loss, worst, worst_key


def complaints(o, found, batch, seq, dtype):
    """What is wrong with names, shapes and dtypes in the file braid wrote."""
    shapes = parameter_shapes(o)
    expected = {"loss": (1,), "logits": (batch * seq, o["model.vocab"])}
    for key, shape in shapes.items():
        expected["param." + key] = expected["grad." + key] = shape
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        want = torch.float64 if name == "loss" else dtype
        if tuple(found[name].shape) != expected[name]:
            wrong.append(f"{name} has shape {tuple(found[name].shape)}, not {expected[name]}")
        elif found[name].dtype != want:
            wrong.append(f"{name} has dtype {found[name].dtype}, not {want}")
    return sorted(wrong)


def judge(o, found, tokens, labels, device):
    """Compare one file of braid; returns (passed, text of the table row)."""
    dtype = torch.float64 if device == "ref" else torch.float32
    wrong = complaints(o, found, *tokens.shape, dtype)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return False, "FAIL  " + "; ".join(wrong[:3]) + more
    params = {key[6:]: value for key, value in found.items() if key.startswith("param.")}
    exact = run_model(o, params, tokens, labels, torch.float64)
    rounded = run_model(o, params, tokens, labels, torch.float32)
    loss, worst, key = worst_errors(found, exact)
    torch_loss, torch_worst, _ = worst_errors(rounded, exact)
    loss_limit, limit = TOLERANCE[device]
    passed = loss <= loss_limit and worst <= limit
    return passed, (
        f"{'ok' if passed else 'FAIL':4}  {loss:9.1e} {torch_loss:9.1e}  "
        f"{worst:9.1e} {torch_worst:9.1e}  {key}"
    )


HEADING = (
    f"{'':24} {'':4}  {'loss error':>19}  {'worst error':>19}\n"
    f"{'case':24} {'':4}"
    + 2 * f"  {'braid':>9} {'torch':>9}"
    + "  braid's worst tensor"
)

# ---- cases -------------------------------------------------------------------------------------

# Weights ten times the usual ones, so that attention is far from uniform; one microbatch.
COMMON = ["model.init_std=0.2", "train.global_batch=2"]
# A small base and window of context: rotations differ at all frequencies within 32 positions, and
# each scaling has frequencies that are kept, stretched and in between.
SHORT_ROPE = ["model.rope_base=100", "model.rope_original=64", "model.rope_factor=4"]
YARN = [*SHORT_ROPE, "model.rope_scaling=yarn", "model.rope_beta_fast=8"]
CASES = {
    "plain MHA, untied": ["model.kv_heads=2", "model.tied=off"],
    "MQA": [],
    "GQA": ["model.heads=6", "model.kv_heads=3", "model.head_dim=8"],
    "tied head": ["model.kv_heads=2", "model.tied=on"],
    "padded vocabulary": ["model.vocab_multiple=96", "model.tied=off"],
    "qk_norm": ["model.qk_norm=on"],
    "attn_gate": ["model.attn_gate=on", "model.heads=4", "model.kv_heads=2"],
    "sliding window": ["model.attn_window=5"],
    "window, every 2nd full": ["model.attn_window=5", "model.attn_window_skip=2"],
    "sink learnable": ["model.attn_sink=learnable"],
    "sink off_by_one": ["model.attn_sink=off_by_one"],
    "sink and window": ["model.attn_sink=learnable", "model.attn_window=7"],
    "softmax_scale": ["model.softmax_scale=0.4"],
    "rope none": ["model.rope=none"],
    "rope interleaved": ["model.rope=interleaved"],
    "rope partial": ["model.rope_percent=0.5"],
    "rope partial interleaved": ["model.rope_percent=0.5", "model.rope=interleaved"],
    "rope linear": [*SHORT_ROPE, "model.rope_scaling=linear"],
    "rope llama3": [*SHORT_ROPE, "model.rope_scaling=llama3"],
    "rope yarn": YARN,
    "rope yarn mscale": [*YARN, "model.rope_mscale=1", "model.rope_mscale_all_dim=0.5"],
    "no_rope_freq": ["model.no_rope_freq=2"],
    "geglu": ["model.act=geglu"],
    "quick_geglu": ["model.act=quick_geglu", "model.act_clamp=0.7", "model.act_offset=1"],
    "swiglu clamped": ["model.act_clamp=0.5"],
    "relu2": ["model.act=relu2"],
    "gelu": ["model.act=gelu"],
    "quick_gelu": ["model.act=quick_gelu", "model.act_alpha=1.5"],
    "silu": ["model.act=silu"],
    "qkv_bias": ["model.qkv_bias=on"],
    "biases": ["model.bias=on"],
    "zero-centred norm": ["model.norm_zero_centered=on", "model.qk_norm=on"],
    "norm_eps": ["model.norm_eps=0.1"],
    "ignored labels": [],
    "z_loss": ["train.z_loss=0.1"],
    "z_loss, ignored labels": ["train.z_loss=0.1"],
    "everything": [
        *YARN, "model.heads=4", "model.kv_heads=2", "model.head_dim=12", "model.qk_norm=on",
        "model.attn_gate=on", "model.attn_window=9", "model.attn_sink=learnable", "model.bias=on",
        "model.rope=interleaved", "model.norm_zero_centered=on", "model.tied=off",
        "model.act=quick_geglu", "model.act_clamp=0.7", "model.act_offset=1", "train.z_loss=0.01",
    ],
}  # fmt: skip


def make_batch(o, name):
    """Random tokens and the labels that follow them; every third label ignored where asked."""
    generator = torch.Generator().manual_seed(7)
    # Tokens stay below the tokenizer's 256 also where the vocabulary is padded.
    shape = (o["train.micro_batch"], o["train.seq"] + 1)
    text = torch.randint(0, min(256, o["model.vocab"]), shape, generator=generator)
    text = text.to(torch.int32)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if "ignored labels" in name:
        labels[0, ::3] = -1
        labels[-1, 4:] = -1
    return tokens, labels


# ---- running braid -----------------------------------------------------------------------------


class BraidError(Exception):
    pass


def run_braid(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise BraidError(f"exit code {done.returncode}: " + " / ".join(said[-3:]))


def train_briefly(args, options, folder):
    """A run that moves every parameter away from its initial value; returns its folder."""
    text = os.path.join(folder, "text.txt")
    generator = torch.Generator().manual_seed(11)
    letters = torch.randint(97, 123, (20000,), generator=generator)
    with open(text, "wb") as f:
        f.write(bytes(letters.tolist()))
    run = os.path.join(folder, "run")
    run_braid(
        [args.braid, "train", args.config, *options, f"--data.train={text}", f"--run.dir={run}",
         "--train.steps=20", "--train.lr=0.02", "--train.schedule=constant", "--run.quiet=on"]
    )  # fmt: skip
    return run


def run_case(args, name, folder):
    overrides = COMMON + CASES[name]
    o = read_options(args.config, overrides)
    tokens, labels = make_batch(o, name)
    source, target = os.path.join(folder, "in.safetensors"), os.path.join(folder, "out.safetensors")
    save_file({"tokens": tokens, "labels": labels}, source)
    options = [f"--{item}" for item in overrides] + [f"--run.device={args.device}"]
    extra = []
    try:
        if args.trained:
            extra = [f"--ckpt={train_briefly(args, options, folder)}"]
        run_braid(
            [args.braid, "grads", args.config, *options, *extra, "--in", source, "--out", target]
        )
        found = load_file(target)
    except (BraidError, OSError) as problem:
        return False, f"FAIL  {problem}"
    norm = found.get("param.decoder.final_norm.weight")
    if args.trained and norm is not None and bool((norm == norm[0]).all()):
        return False, "FAIL  the parameters are fresh ones: the checkpoint was not used"
    return judge(o, found, tokens, labels, args.device)


def run_cases(args):
    wanted = [n for n in CASES if not args.case or any(c.lower() in n.lower() for c in args.case)]
    if not wanted:
        sys.exit("parity_torch.py: no case matches; the names are " + ", ".join(CASES))
    print(HEADING)
    failed = []
    for name in wanted:
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            passed, row = run_case(args, name, folder)
        print(f"{name:24} {row}", flush=True)
        if not passed:
            failed.append(name)
    loss_limit, limit = TOLERANCE[args.device]
    print(
        f"{len(wanted) - len(failed)} of {len(wanted)} cases passed "
        f"(device {args.device}, loss within {loss_limit:g}, logits and gradients within {limit:g})"
    )
    return 1 if failed else 0


# ---- self-test ---------------------------------------------------------------------------------


def random_params(o):
    """Parameters of the size braid starts with, but with no 0 or 1 that would hide a mistake."""
    generator = torch.Generator().manual_seed(3)
    params = {}
    for key, shape in parameter_shapes(o).items():
        value = torch.randn(shape, generator=generator)
        if key.endswith("norm_weight") or key.endswith("norm.weight"):
            value = 0.2 * value + (0 if o["model.norm_zero_centered"] else 1)
        elif key.endswith("softmax_offset"):
            value = value + 1
        else:
            value = 0.2 * value
        params[key] = value
    return params


def fake_output(o, tokens, labels, device):
    """The file a faultless braid would write."""
    dtype = torch.float64 if device == "ref" else torch.float32
    params = {key: value.to(dtype) for key, value in random_params(o).items()}
    result = run_model(o, params, tokens, labels, torch.float64)
    found = {key: value.to(dtype) for key, value in result.items()}
    found["loss"] = result["loss"]
    found.update({"param." + key: value for key, value in params.items()})
    return found


def faults(found):
    """Pairs of (description, faulty copy): each must be noticed."""
    for key in found:
        if key.startswith("param."):
            continue
        for text, change in (
            ("off by a thousandth", lambda t: t * 1.001),
            ("not a number at one place", lambda t: t.index_fill(0, torch.tensor(0), math.nan)),
        ):
            yield f"{key} {text}", {**found, key: change(found[key])}
    key = "grad.decoder.layers.0.self_attention.linear_qkv.weight"
    yield f"{key} with its first rows swapped", {**found, key: found[key].roll(1, 0)}
    yield f"{key} missing", {k: v for k, v in found.items() if k != key}
    yield f"{key} flattened", {**found, key: found[key].flatten()}
    yield f"{key} in half precision", {**found, key: found[key].half()}
    yield "a tensor too many", {**found, "grad.none": torch.zeros(1)}
    key = "param.decoder.layers.0.self_attention.linear_qkv.weight"
    yield f"{key} with its first rows swapped", {**found, key: found[key].roll(1, 0)}


def model_disagreements():
    """Check the model above where PyTorch or algebra has the same thing ready made."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, generator=generator, dtype=torch.float64)
    o = dict(DEFAULTS, **{"model.head_dim": 8, "model.act": "geglu", "model.ffn": 4})
    f = torch.nn.functional

    def differ(name, a, b):
        if not torch.allclose(a, b, rtol=1e-12, atol=1e-12):
            yield f"{name} differs by {(a - b).abs().max().item():.1e}"

    yield from differ("rms_norm", rms_norm(o, x, weight), f.rms_norm(x, (8,), weight, 1e-5))
    gate, up = x.chunk(2, -1)
    yield from differ("geglu", activation(o, x), f.gelu(gate, approximate="tanh") * up)
    swiglu = dict(o, **{"model.act": "swiglu"})
    yield from differ("swiglu", activation(swiglu, x), f.silu(gate) * up)
    relu2 = dict(o, **{"model.act": "relu2"})
    yield from differ("relu2", activation(relu2, x), f.relu(x) ** 2)

    # Neighbouring channels as the two parts of complex numbers: a rotation is a multiplication.
    angles, _ = rope_angles(o, 9)
    turned = torch.view_as_complex(x.reshape(2, 9, 4, 2)) * torch.polar(angles * 0 + 1, angles)
    interleaved = dict(o, **{"model.rope": "interleaved"})
    expected = torch.view_as_real(turned).flatten(2)
    yield from differ("rope interleaved", apply_rope(interleaved, x), expected)
    # The half layout is the interleaved one with its channels in another order.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    back = [order.index(c) for c in range(8)]
    expected = apply_rope(interleaved, x[..., order])[..., back]
    yield from differ("rope half", apply_rope(o, x), expected)
    for scaling in ("linear", "llama3", "yarn"):
        scaled = dict(o, **{"model.rope_scaling": scaling})
        yield from differ(f"rope {scaling} by 1", apply_rope(scaled, x), apply_rope(o, x))

    scores = torch.randn(1, 3, 5, generator=generator, dtype=torch.float64)
    sink = torch.tensor(0.7, dtype=torch.float64)
    expected = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.exp())
    yield from differ("sink", softmax_with_sink(scores, sink), expected)

    labels = torch.tensor([[1, -1, 3], [-1, 0, 7]])
    logits = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    expected = f.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    yield from differ("cross entropy", compute_losses(o, logits, labels)[0], expected)
    yield from differ("whole model", *both_models())


def both_models():
    """Logits of this model and of the one in speed_torch.py, made of PyTorch's own modules."""
    import speed_torch

    path = os.path.join(ROOT, "configs", "tiny.ini")
    o = read_options(path, COMMON + CASES["plain MHA, untied"])
    params = {key: value.double() for key, value in random_params(o).items()}
    other = speed_torch.Model(o).double()
    nh, hd = o["model.heads"], o["model.head_dim"]
    weights = {
        "embed.weight": params["embedding.word_embeddings.weight"],
        "norm.weight": params["decoder.final_norm.weight"],
        "head.weight": params["output_layer.weight"],
    }
    for i, symbol in enumerate(o["model.pattern"]):
        at = f"decoder.layers.{i}." + ("self_attention.linear_" if symbol == "*" else "mlp.linear_")
        names = ("qkv", "proj") if symbol == "*" else ("fc1", "fc2")
        weights[f"layers.{i}.norm.weight"] = params[at + names[0] + ".layer_norm_weight"]
        for name in names:
            weights[f"layers.{i}.{name}.weight"] = params[f"{at}{name}.weight"]
        if symbol == "*":  # [head, q|k|v, channel] to [q|k|v, head, channel]
            rows = weights[f"layers.{i}.qkv.weight"].view(nh, 3, hd, -1).transpose(0, 1)
            weights[f"layers.{i}.qkv.weight"] = rows.reshape(3 * nh * hd, -1)
    angles, _ = rope_angles(o, o["train.seq"])
    weights.update({"cos": angles.cos(), "sin": angles.sin()})
    other.load_state_dict(weights)
    tokens, _ = make_batch(o, "")
    with torch.no_grad():
        return compute_logits(o, params, tokens.long()), other(tokens.long())


def self_test(args):
    print(HEADING)
    bad = list(model_disagreements())
    seen = {}
    for name, changes in CASES.items():
        o = read_options(args.config, COMMON + changes)
        tokens, labels = make_batch(o, name)
        found = fake_output(o, tokens, labels, args.device)
        passed, row = judge(o, found, tokens, labels, args.device)
        print(f"{name:24} {row}", flush=True)
        if not passed:
            bad.append(f"{name}: faultless output failed")
        # Each case must compute something that no other does, or its options are not looked at.
        values = tuple(found[key].double().norm().item() for key in sorted(found))
        if values in seen:
            bad.append(f"{name}: computes the same as {seen[values]}")
        seen[values] = name

    o = read_options(args.config, COMMON + CASES["everything"])
    tokens, labels = make_batch(o, "")
    count = 0
    for text, found in faults(fake_output(o, tokens, labels, args.device)):
        count += 1
        if judge(o, found, tokens, labels, args.device)[0]:
            bad.append(f"not noticed: {text}")
    print(f"{len(CASES)} faultless and {count} faulty outputs judged, {len(bad)} mistakes")
    for text in bad:
        print("  " + text)
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--braid", default=os.path.join(ROOT, "build", "braid"), metavar="PATH")
    parser.add_argument("--config", default=os.path.join(ROOT, "configs", "tiny.ini"))
    parser.add_argument("--device", default="cpu", choices=sorted(TOLERANCE))
    parser.add_argument("--case", action="append", metavar="PART", help="only cases named like it")
    parser.add_argument("--trained", action="store_true", help="train briefly before comparing")
    parser.add_argument("--self-test", action="store_true", help="check this script without braid")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny
    return self_test(args) if args.self_test else run_cases(args)


if __name__ == "__main__":
    sys.exit(main())
