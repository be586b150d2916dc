#!/usr/bin/env python3
"""Compare braid's Mamba-2 layer with independent implementations in PyTorch.

  parity_mamba.py [--braid build/braid]

1. The state-space core (ops ssd_fwd, ssd_bwd) against the recurrence written as a loop over tokens in float64,
   gradients by autograd: clamps, packed documents, given initial and final states, several chunk sizes.
2. A whole model with one Mamba-2 layer (`braid grads`) against the same model around that loop in float64: loss,
   logits, every gradient.
3. The same against Hugging Face's Mamba2 and Nemotron-H mixers, where transformers is installed. Those compute in
   float32 inside, so they are as far from the truth as rounding puts them.

Errors are relative to the largest value of each tensor. Exit status 1 if one is above its bound."""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def softplus(x):
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def recurrence(x, dt, a_log, dt_bias, d, b, c, dt_min=0.0, dt_max=0.0, init=None, doc=None):
    """h = exp(delta A) h + delta B x^T, y = C h + D x, one token at a time. Returns y and the last h [B, H, N, P]."""
    batch, seq, heads, width = x.shape
    per_group = heads // b.shape[2]
    delta = softplus(dt + dt_bias).clamp(min=dt_min, max=dt_max if dt_max > 0 else None)
    rate = -torch.exp(a_log)
    h = torch.zeros(batch, heads, b.shape[3], width, dtype=x.dtype) if init is None else init
    out = []
    for t in range(seq):
        if doc is not None:
            h = h * (doc[:, t] != t).to(h.dtype)[:, None, None, None]
        bt = b[:, t].repeat_interleave(per_group, dim=1)
        ct = c[:, t].repeat_interleave(per_group, dim=1)
        write = delta[:, t, :, None, None] * bt[..., :, None] * x[:, t, :, None, :]
        h = torch.exp(delta[:, t] * rate)[..., None, None] * h + write
        out.append(torch.einsum("bhnp,bhn->bhp", h, ct) + d[:, None] * x[:, t])
    return torch.stack(out, 1) if out else torch.zeros_like(x), h


# ---- running braid -------------------------------------------------------------------------------

def run(braid, *words):
    done = subprocess.run([braid, *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"braid {' '.join(words)}\n{done.stderr}")


def braid_op(braid, folder, name, device, tensors, **attributes):
    source, target = os.path.join(folder, "in.safetensors"), os.path.join(folder, "out.safetensors")
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, source)
    words = [f"{k}={v}" for k, v in attributes.items()]
    run(braid, "op", name, f"--in={source}", f"--out={target}", f"--dev={device}", *words)
    return {k: v.double() for k, v in load_file(target).items()}


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-12)).item()


class Table:
    def __init__(self):
        self.failed = False

    def row(self, case, device, errors, bound):
        name, worst = max(errors.items(), key=lambda kv: kv[1])
        ok = worst <= bound
        self.failed |= not ok
        print(f"| {case:<44} | {device:<4} | {worst:9.2e} | {name:<12} | {bound:.0e} | {'ok' if ok else 'FAILED'} |", flush=True)


# ---- 1. the core ---------------------------------------------------------------------------------

CORE = [  # name, sizes (batch, seq, heads, width, groups, state), options
    ("plain", (2, 50, 4, 16, 2, 8), {}),
    ("one token", (1, 1, 2, 8, 1, 4), {}),
    ("clamped steps", (2, 40, 4, 8, 1, 16), {"dt_min": 0.3, "dt_max": 1.0}),
    ("documents", (2, 150, 2, 16, 1, 16), {"doc": True}),
    ("initial and final state", (2, 70, 6, 8, 3, 8), {"init": True}),
    ("documents and states", (1, 90, 2, 32, 2, 8), {"init": True, "doc": True}),
    ("long, wide", (1, 300, 2, 64, 1, 128), {}),
]


def core_case(sizes, options):
    gen = torch.Generator().manual_seed(1)
    batch, seq, heads, width, groups, state = sizes

    def draw(*shape):
        return torch.randn(*shape, generator=gen).double()  # float32 values

    t = {"x": draw(batch, seq, heads, width), "dt": draw(batch, seq, heads), "A_log": draw(heads) - 2, "dt_bias": draw(heads),
         "D": draw(heads), "Bm": draw(batch, seq, groups, state), "Cm": draw(batch, seq, groups, state)}
    for k in ("A_log",):
        t[k] = t[k].float().double()
    if options.get("init"):
        t["init"] = draw(batch, heads, state, width)
    doc = None
    if options.get("doc"):
        starts = (torch.rand(batch, seq, generator=gen) < 0.05) * torch.arange(seq)
        doc = starts.cummax(dim=1).values.int() if not options.get("init") else (starts - 1 * (starts == 0)).cummax(dim=1).values.int()
    return t, doc, draw(batch, seq, heads, width), draw(batch, heads, state, width)


def check_core(braid, folder, table):
    for name, sizes, options in CORE:
        t, doc, dy, dfinal = core_case(sizes, options)
        for v in t.values():
            v.requires_grad_()
        limits = {k: options.get(k, 0.0) for k in ("dt_min", "dt_max")}
        y, final = recurrence(t["x"], t["dt"], t["A_log"], t["dt_bias"], t["D"], t["Bm"], t["Cm"], init=t.get("init"), doc=doc, **limits)
        loss = (y * dy).sum() + ((final * dfinal).sum() if "init" in t else 0)
        loss.backward()
        extra = {} if doc is None else {"doc_start": doc}
        for device, chunk, bound in (("ref", 16, 1e-12), ("cpu", 16, 2e-5), ("cpu", 64, 2e-5), ("cpu", 128, 2e-5), ("cpu", 256, 2e-5)):
            f = braid_op(braid, folder, "ssd_fwd", device, {**t, **extra}, chunk=chunk, **limits)
            errors = {"y": error(f["y"], y), "final": error(f["final"], final)}
            grads_in = {k: v for k, v in t.items() if k != "init"} | extra | {"dy": dy, "states": f["states"]}
            if "init" in t:
                grads_in["dfinal"] = dfinal
            b = braid_op(braid, folder, "ssd_bwd", device, grads_in, chunk=chunk, **limits)
            errors |= {"d" + k: error(b["d" + k], v.grad) for k, v in t.items()}
            table.row(f"core: {name}, chunk {chunk}", device, errors, bound)


# ---- 2. and 3. a model with one layer ----------------------------------------------------------------

def loop_mixer(p, o):
    """The whole layer around the recurrence; p: parameters by name under mixer."""
    inner, gn = o["heads"] * o["dim"], o["groups"] * o["state"]

    def forward(u):
        z, xbc, dt = torch.split(u @ p["in_proj.weight"].T, [inner, inner + 2 * gn, o["heads"]], dim=-1)
        w = p["conv1d.weight"][:, 0]
        pad = F.pad(xbc, (0, 0, w.shape[1] - 1, 0))
        xbc = F.silu(sum(pad[:, k : k + u.shape[1]] * w[:, k] for k in range(w.shape[1])) + p["conv1d.bias"])
        x, b, c = torch.split(xbc, [inner, gn, gn], dim=-1)
        shape = u.shape[:2]
        y, _ = recurrence(x.reshape(*shape, o["heads"], o["dim"]), dt, p["A_log"], p["dt_bias"], p["D"],
                          b.reshape(*shape, o["groups"], -1), c.reshape(*shape, o["groups"], -1), o.get("dt_min", 0), o.get("dt_max", 0))
        v = y.reshape(*shape, inner) * F.silu(z)
        v = v.reshape(*shape, 1 if o.get("norm") == "whole" else o["groups"], -1)
        v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (v.reshape(*shape, inner) * p["norm.weight"]) @ p["out_proj.weight"].T

    return forward


def hugging_face_mixer(kind, p, o):
    if kind == "Mamba2":
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
        config = Mamba2Config(hidden_size=o["hidden"], num_heads=o["heads"], head_dim=o["dim"], state_size=o["state"], expand=2,
                              n_groups=o["groups"], conv_kernel=4, chunk_size=32, num_hidden_layers=1)
        mixer = Mamba2Mixer(config, 0)
    else:
        from transformers import NemotronHConfig
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
        config = NemotronHConfig(hidden_size=o["hidden"], mamba_num_heads=o["heads"], mamba_head_dim=o["dim"], ssm_state_size=o["state"],
                                 n_groups=o["groups"], conv_kernel=4, chunk_size=32, time_step_min=o["dt_min"],
                                 hybrid_override_pattern="M", num_hidden_layers=1)
        mixer = NemotronHMamba2Mixer(config, 0)
    mixer.load_state_dict({k: v.float() for k, v in p.items()})
    return mixer.train()


def model_loss(params, mixer, tokens, labels):
    def norm(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    x = params["embedding.word_embeddings.weight"][tokens.long()]
    x = x + mixer(norm(x, params["decoder.layers.0.mixer.in_proj.layer_norm_weight"]))
    x = norm(x, params["decoder.final_norm.weight"])
    logits = x @ params["output_layer.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().long()), logits


LAYERS = [  # name, options, references
    ("groups", {"hidden": 32, "heads": 8, "dim": 8, "state": 16, "groups": 4}, ("loop", "Mamba2")),
    ("odd sizes, clamps", {"hidden": 24, "heads": 3, "dim": 5, "state": 7, "groups": 1, "dt_min": 0.01, "dt_max": 0.05}, ("loop",)),
    ("whole norm", {"hidden": 32, "heads": 8, "dim": 8, "state": 16, "groups": 2, "norm": "whole"}, ("loop",)),
    ("steps of at least 0.001", {"hidden": 32, "heads": 8, "dim": 8, "state": 16, "groups": 4, "dt_min": 0.001}, ("loop", "NemotronH")),
]


def check_layer(braid, folder, table, name, o, references):
    gen = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 61, (2, 83), generator=gen, dtype=torch.int32)
    labels = torch.randint(0, 61, (2, 83), generator=gen, dtype=torch.int32)
    source, target = os.path.join(folder, "tokens.safetensors"), os.path.join(folder, "grads.safetensors")
    save_file({"tokens": tokens, "labels": labels}, source)
    options = {"model.pattern": "M", "model.vocab": 61, "model.tied": "off", "model.hidden": o["hidden"], "model.heads": 1, "model.init_std": 0.3,
               "model.mamba_heads": o["heads"], "model.mamba_head_dim": o["dim"], "model.mamba_state": o["state"],
               "model.mamba_groups": o["groups"], "model.mamba_dt_min": o.get("dt_min", 0), "model.mamba_dt_max": o.get("dt_max", 0),
               "model.mamba_norm": o.get("norm", "group"), "model.mamba_chunk": 32}
    for device, bound in (("ref", 1e-12), ("cpu", 2e-5)):
        run(braid, "grads", f"--in={source}", f"--out={target}", f"--run.device={device}", "--run.quiet=on", *[f"--{k}={v}" for k, v in options.items()])
        out = load_file(target)
        for reference in references:
            kind = torch.float64 if reference == "loop" else torch.float32
            params = {k[6:]: v.detach().to(kind, copy=True).requires_grad_() for k, v in out.items() if k.startswith("param.")}
            own = {k.split(".mixer.")[1]: v for k, v in params.items() if ".mixer." in k and "layer_norm" not in k}
            try:
                mixer = loop_mixer(own, o) if reference == "loop" else hugging_face_mixer(reference, {k: v.detach() for k, v in own.items()}, o)
            except ImportError as problem:
                print(f"| layer: {name} against {reference}: skipped, {problem}")
                continue
            loss, logits = model_loss(params, mixer, tokens, labels)
            loss.backward()
            grads = {k: v.grad for k, v in params.items()}
            if reference != "loop":
                for k, v in mixer.named_parameters():
                    grads["decoder.layers.0.mixer." + k] = v.grad
            errors = {"loss": error(out["loss"].reshape(()), loss), "logits": error(out["logits"].reshape(logits.shape), logits)}
            errors |= {k.replace("decoder.layers.0.mixer.", ""): error(out["grad." + k], g) for k, g in grads.items()}
            table.row(f"layer: {name}, against {reference}", device, errors, bound if reference == "loop" else 3e-5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default=os.path.join(ROOT, "build", "braid"))
    braid = parser.parse_args().braid
    torch.set_num_threads(2)
    table = Table()
    print("| case                                         | dev  | largest error | where | bound | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        check_core(braid, folder, table)
        for name, o, references in LAYERS:
            check_layer(braid, folder, table, name, o, references)
    sys.exit(table.failed)


if __name__ == "__main__":
    main()
