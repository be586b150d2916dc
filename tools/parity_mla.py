#!/usr/bin/env python3
"""Compare the multi-latent attention of braid ('+') with the attention of Hugging Face DeepSeek-V3.

  parity_mla.py --braid build/braid                fresh weights, on braid's cpu device
  parity_mla.py --braid build/braid --device ref   on its double-precision reference device
  parity_mla.py --braid build/braid --trained      weights of a short run, where the gains of the norms are not 1

The model is embedding, then RMSNorm, attention and residual for each layer, RMSNorm, head. `braid grads` computes
loss and all gradients for random tokens and writes its parameters; PyTorch takes them over, and its attention and
rotary tables are those of the transformers package. The judge is that package in float64: where it asks for
float32 it gets float64, which changes rounding and nothing else. The columns "hf" are the package as it is, in
float32, against the judge. Errors: of the loss, relative; of gradients, the norm of the difference over the norm,
of the worst parameter.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

BATCH, SEQ, VOCAB = 2, 37, 256
NORM_EPS = 1e-3  # unlike the 1e-6 of the latents' norms, so that one taken for the other shows
LIMITS = {"cpu": (1e-6, 1e-4), "ref": (1e-9, 1e-9)}
BASE = {"model.pattern": "+", "model.hidden": 48, "model.heads": 3, "model.vocab": VOCAB, "model.mla_q_rank": 20,
        "model.mla_kv_rank": 14, "model.mla_nope": 10, "model.mla_rope": 8, "model.mla_v": 6, "model.mla_norm_eps": 1e-6,
        "model.norm_eps": NORM_EPS, "model.init_std": 0.2, "model.vocab_multiple": 1, "train.seq": SEQ,
        "train.micro_batch": BATCH, "run.threads": 1}  # fmt: skip
YARN = {"model.rope_scaling": "yarn", "model.rope_factor": 40, "model.rope_original": 32, "model.rope_beta_fast": 4}

# options of braid that differ from BASE; "half" is the other layout of rotary channels in the package
CASES = {
    "queries from h": {"model.mla_q_rank": 0},
    "queries from a latent": {},
    "three layers, untied": {"model.pattern": "+++", "model.tied": "off"},
    "one head": {"model.heads": 1, "model.mla_nope": 1, "model.mla_rope": 2, "model.mla_v": 5},
    "values wider than keys": {"model.mla_v": 32, "model.mla_rope": 4, "model.mla_nope": 4},
    "another rope base": {"model.rope_base": 50},
    "half layout": {"half": True},
    "half layout, queries from h": {"half": True, "model.mla_q_rank": 0},
    "yarn, mscale of DeepSeek-V3": YARN | {"model.rope_mscale": 1, "model.rope_mscale_all_dim": 1},
    "yarn, two mscales": YARN | {"model.rope_mscale": 1.3, "model.rope_mscale_all_dim": 0.6},
    "yarn, no mscale": YARN,
    "yarn, half layout": YARN | {"model.rope_mscale": 1, "model.rope_mscale_all_dim": 0.8, "half": True},
}

# braid's keys and the package's names
NAMES = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
}


class InDouble:
    """torch, but what asks for float32 gets float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def package_config(o):
    rope = {"rope_type": "default", "rope_theta": float(o.get("model.rope_base", 10000))}
    if o.get("model.rope_scaling") == "yarn":
        rope |= {"rope_type": "yarn", "factor": float(o["model.rope_factor"]), "beta_fast": float(o["model.rope_beta_fast"]),
                 "beta_slow": 1.0, "original_max_position_embeddings": o["model.rope_original"]}  # fmt: skip
        if "model.rope_mscale" in o:
            rope |= {"mscale": float(o["model.rope_mscale"]), "mscale_all_dim": float(o["model.rope_mscale_all_dim"])}
    config = deepseek.DeepseekV3Config(
        hidden_size=o["model.hidden"], num_attention_heads=o["model.heads"], num_key_value_heads=o["model.heads"],
        q_lora_rank=o["model.mla_q_rank"] or None, kv_lora_rank=o["model.mla_kv_rank"],
        qk_nope_head_dim=o["model.mla_nope"], qk_rope_head_dim=o["model.mla_rope"], v_head_dim=o["model.mla_v"],
        rope_interleave=not o.get("half"), rope_parameters=rope, max_position_embeddings=40 * 32)  # fmt: skip
    config._attn_implementation = "eager"
    return config


def rows_in_package(o, key):
    """Which row of braid's weight each row of the package's is: the half layout keeps the even rotary channels in
    front of the odd ones. None: the same."""
    n, r = o["model.mla_nope"], o["model.mla_rope"]
    if not o.get("half"):
        return None
    halves = torch.cat([torch.arange(0, r, 2), torch.arange(1, r, 2)])
    if key == "linear_kv_down_proj.weight":
        return torch.cat([torch.arange(o["model.mla_kv_rank"]), o["model.mla_kv_rank"] + halves])
    if key in ("linear_q_proj.weight", "linear_q_up_proj.weight"):
        head = torch.cat([torch.arange(n), n + halves])
        return torch.cat([h * (n + r) + head for h in range(o["model.heads"])])
    return None


def norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * w


def package_model(o, params, tokens, labels, dtype):
    """Loss, and gradients by braid's key."""
    p = {k: v.to(dtype).clone().requires_grad_() for k, v in params.items()}
    config = package_config(o)
    mask = torch.full((SEQ, SEQ), float("-inf"), dtype=dtype).triu(1)[None, None]
    x = p["embedding.word_embeddings.weight"][tokens]
    position = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(SEQ)[None])
    assert position[0].dtype == dtype
    blocks = []
    for i in range(len(o["model.pattern"])):
        layer = f"decoder.layers.{i}."
        block = deepseek.DeepseekV3Attention(config, i).to(dtype)
        own = dict(block.named_parameters())
        with torch.no_grad():
            for key, name in NAMES.items():
                if name in own:
                    rows, w = rows_in_package(o, key), p[layer + "self_attention." + key]
                    own[name].copy_(w if rows is None else w[rows])
        x = x + block(norm(x, p[layer + "input_layernorm.weight"]), position, mask)[0]
        blocks.append((layer, own))
    head = p["output_layer.weight" if o.get("model.tied") == "off" else "embedding.word_embeddings.weight"]
    logits = norm(x, p["decoder.final_norm.weight"]) @ head.T
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-1)
    loss.backward()
    grads = {k: v.grad for k, v in p.items() if v.grad is not None}
    for layer, own in blocks:
        for key, name in NAMES.items():
            if name in own:
                rows, g = rows_in_package(o, key), own[name].grad
                grads[layer + "self_attention." + key] = g if rows is None else torch.empty_like(g).index_copy_(0, rows, g)
    return loss.item(), grads


def judge(o, params, tokens, labels):
    deepseek.torch = modeling_rope_utils.torch = InDouble()
    try:
        return package_model(o, params, tokens, labels, torch.float64)
    finally:
        deepseek.torch = modeling_rope_utils.torch = torch


def braid(args, o, tmp):
    words = [f"--{k}={v}" for k, v in o.items() if k != "half"] + [f"--run.device={args.device}"]
    ckpt = []
    if args.trained:
        text, run = os.path.join(tmp, "text.txt"), os.path.join(tmp, "run")
        with open(text, "w", encoding="utf-8") as f:
            f.write("".join(chr(32 + (i * i * 31 + i // 7) % 29) for i in range(20000)))
        train = [f"--data.train={text}", f"--run.dir={run}", "--train.steps=20", "--train.lr=2e-2", "--run.tensorboard=off"]
        subprocess.run([args.braid, "train", *words, *train, "--run.quiet=on"], check=True, stdout=subprocess.DEVNULL)
        steps = sorted(x for x in os.listdir(run) if x.startswith("step"))
        ckpt = [f"--ckpt={os.path.join(run, steps[-1]) if steps else run}"]
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), dtype=torch.int32)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), dtype=torch.int32)
    labels[0, :5] = -1
    save_file({"tokens": tokens, "labels": labels}, os.path.join(tmp, "in.safetensors"))
    io = [f"--in={tmp}/in.safetensors", f"--out={tmp}/out.safetensors"]
    subprocess.run([args.braid, "grads", *words, *ckpt, *io], check=True, stdout=subprocess.DEVNULL)
    return tokens.long(), labels.long(), load_file(os.path.join(tmp, "out.safetensors"))


def worst(grads, exact):
    """The largest error and the parameter that has it. A missing gradient is an infinite error."""
    errors = {
        k: ((grads[k].double() - g).norm() / g.norm()).item() if k in grads else float("inf") for k, g in exact.items()
    }
    where = max(errors, key=errors.get)
    return errors[where], where


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--device", default="cpu", choices=sorted(LIMITS))
    parser.add_argument("--trained", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    print(f"{'case':28} {'loss':>8} {'braid: loss':>12} {'gradient':>9} {'hf: loss':>9} {'gradient':>9}  worst of braid")
    for case, changes in CASES.items():
        torch.manual_seed(3)
        o = BASE | changes
        with tempfile.TemporaryDirectory() as tmp:
            tokens, labels, out = braid(args, o, tmp)
        params = {k[6:]: v for k, v in out.items() if k.startswith("param.")}
        if args.trained:
            gain = params["decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"]
            assert (gain - 1).abs().max() > 0.01, "the gains did not move"
        loss, exact = judge(o, params, tokens, labels)
        hf_loss, hf_grads = package_model(o, params, tokens, labels, torch.float32)
        grads = {k[5:]: v for k, v in out.items() if k.startswith("grad.")}
        error, where = worst(grads, exact)
        loss_error = abs(out["loss"].item() - loss) / loss
        unknown = sorted(set(grads) - set(exact))
        bad = not (loss_error <= LIMITS[args.device][0] and error <= LIMITS[args.device][1]) or unknown
        failed += bool(bad)
        print(f"{case:28} {loss:8.5f} {loss_error:12.1e} {error:9.1e} {abs(hf_loss - loss) / loss:9.1e}"
              f" {worst(hf_grads, exact)[0]:9.1e}  {where}{' FAILED' if bad else ''} {unknown or ''}")  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
