#!/usr/bin/env python3
"""Tiny files with the key names of Megatron's layouts, for tests/ckpt/test_keymap.c.

Usage: python3 tools/golden_keys.py tests/ckpt/fixtures

All dense files hold the same two Transformer layers (hidden 4, one key/value head), and all files of
experts the same layer of three experts: only names and leading axes differ.
"""
import sys
import zlib

import numpy as np
from safetensors.numpy import save_file

ATTENTION = {"self_attention.linear_qkv.layer_norm_weight": (4,), "self_attention.linear_qkv.weight": (8, 4),
             "self_attention.linear_proj.weight": (4, 4)}
DENSE = {"mlp.linear_fc1.layer_norm_weight": (4,), "mlp.linear_fc1.weight": (6, 4), "mlp.linear_fc2.weight": (4, 3)}
ROUTER = {"pre_mlp_layernorm.weight": (4,), "mlp.router.weight": (3, 4)}
EXPERT = {"linear_fc1.weight": (6, 4), "linear_fc1.bias": (6,), "linear_fc2.weight": (4, 3), "linear_fc2.bias": (4,)}
MAMBA_IN = {"z": 4, "x": 4, "B": 2, "C": 2, "dt": 2}
HYPER = {"mapping_proj.weight": (8, 8), "alpha_pre": (1,), "alpha_post": (1,), "alpha_res": (1,), "bias": (8,)}
MTP_OWN = {"enorm.weight": (4,), "hnorm.weight": (4,), "eh_proj.weight": (4, 8), "final_layernorm.weight": (4,)}


def value(name, shape, space="model"):
    """The same meaning has the same numbers in every file."""
    rng = np.random.default_rng(zlib.crc32(f"{space}/{name}".encode()))
    return rng.standard_normal(shape).astype(np.float32)


def outer(final_norm, space="model"):
    return {"embedding.word_embeddings.weight": value("embed", (5, 4), space),
            f"decoder.{final_norm}.weight": value("final", (4,), space)}


def dense(number_attention, number_mlp, space="model"):
    """Two pairs; the functions say under which number a pair's halves are."""
    out = {}
    for pair in range(2):
        for leaf, shape in ATTENTION.items():
            out[f"decoder.layers.{number_attention(pair)}.{leaf}"] = value(f"{pair}.{leaf}", shape, space)
        for leaf, shape in DENSE.items():
            out[f"decoder.layers.{number_mlp(pair)}.{leaf}"] = value(f"{pair}.{leaf}", shape, space)
    return out


def stacked(space="model"):
    return {f"decoder.layers.{leaf}": np.stack([value(f"{pair}.{leaf}", shape, space) for pair in range(2)])
            for leaf, shape in {**ATTENTION, **DENSE}.items()}


def moments(make, mark):
    """Optimizer state has the model's keys behind a mark."""
    out = {}
    for space in ("exp_avg", "exp_avg_sq"):
        out.update({f"{mark}{space}.{k}": v for k, v in make(space).items()})
    return out


def moe(experts):
    out = {f"decoder.layers.0.{leaf}": value(f"0.{leaf}", shape) for leaf, shape in {**ATTENTION, **ROUTER}.items()}
    for leaf, shape in EXPERT.items():
        out.update(experts(leaf, [value(f"expert {k}.{leaf}", shape) for k in range(3)]))
    out.update(outer("final_layernorm"))
    return out


def interleave(leaf, stack, g):
    """Gate and up rows of each expert in alternating blocks of g."""
    if "linear_fc1" not in leaf:
        return stack
    e, rows = stack.shape[:2]
    return stack.reshape(e, 2, rows // 2 // g, g, *stack.shape[2:]).swapaxes(1, 2).reshape(stack.shape)


def mtp(where):
    out = dense(lambda i: i, lambda i: i)
    out.update(outer("final_layernorm"))
    for leaf, shape in MTP_OWN.items():
        out[f"mtp.layers.0.{leaf}"] = value(f"mtp.{leaf}", shape)
    for k, leaves in enumerate((ATTENTION, DENSE)):
        for leaf, shape in leaves.items():
            out[f"mtp.layers.0.{where(k)}{leaf}"] = value(f"mtp.{leaf}", shape)
    return out


def mamba(split):
    parts = [value(f"in {k}", (rows, 4)) for k, rows in MAMBA_IN.items()]
    key = "decoder.layers.0.mixer.in_proj.weight"
    return {f"{key}.{k}": p for k, p in zip(MAMBA_IN, parts)} if split else {key: np.concatenate(parts)}


def masters():
    """A model in bf16 beside its fp32 master weights, as a distributed optimizer stores them."""
    model = {**dense(lambda i: i, lambda i: i), **outer("final_layernorm")}
    rounded = {k: (v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for k, v in model.items()}
    return {**rounded, **{f"chained_0.optimizer.state.fp32_param.{k}": v for k, v in model.items()},
            "chained_0.optimizer.param_groups.step": np.zeros(1, np.float32)}


def hyper(own, inner):
    """One layer of attention, one of Mamba and one MLP, each with hyper-connections of two streams."""
    out = dict(outer("final_norm"))
    for layer, (name, leaves) in enumerate((("self_attention_", ATTENTION), ("", {"mixer.in_proj.weight": (14, 4)}),
                                            ("mlp_", DENSE))):
        for leaf, shape in leaves.items():
            out[f"decoder.layers.{layer}.{inner}{leaf}"] = value(f"{layer}.{leaf}", shape)
        for leaf, shape in HYPER.items():
            out[f"decoder.layers.{layer}.{own(name)}hyper_connection.{leaf}"] = value(f"{layer}.hyper.{leaf}", shape)
    return out


def main(folder):
    extra = {f"decoder.layers.{i}.self_attention.linear_qkv._extra_state": np.zeros(0, np.uint8) for i in range(2)}
    layer = "decoder.layers.0.mlp.experts."
    files = {
        "flat_hybrid": {**dense(lambda i: 2 * i, lambda i: 2 * i + 1), **outer("final_norm"),
                        **moments(lambda s: {**dense(lambda i: 2 * i, lambda i: 2 * i + 1, s), **outer("final_norm", s)}, "")},
        "grouped_hybrid": {**dense(lambda i: i, lambda i: i), **outer("final_layernorm")},
        "gpt_indexed": {f"module.module.{k}": v for k, v in
                        {**dense(lambda i: i, lambda i: i), **outer("final_layernorm"), **extra}.items()},
        "gpt_stacked": {**stacked(), **outer("final_layernorm"),
                        **moments(lambda s: {**stacked(s), **outer("final_layernorm", s)}, "optimizer.state."),
                        "output_layer._extra_state": np.zeros(0, np.uint8)},
        "experts_grouped": moe(lambda leaf, list: {layer + leaf: np.stack(list)}),
        "experts_indexed": moe(lambda leaf, list: {f"{layer}{leaf}{k}": v for k, v in enumerate(list)}),
        "experts_distributed": moe(lambda leaf, list: {f"{layer}experts.{leaf}": np.stack(list)}),
        "experts_sequential": moe(lambda leaf, list: {f"{layer}local_experts.{k}.{leaf}": v for k, v in enumerate(list)}),
        "experts_packed": moe(lambda leaf, list: {layer + leaf: np.concatenate(list)}),
        "mtp_hybrid": mtp(lambda k: f"mtp_model_layer.layers.{k}."),
        "mtp_gpt": mtp(lambda k: "transformer_layer."),
        "fp32_param": masters(),
        "hyper_own": hyper(lambda name: name, ""),
        "hyper_hybrid": hyper(lambda name: "", "inner_layer."),
        "mamba_whole": mamba(False),
        "mamba_split": mamba(True),
    }
    for name, tensors in files.items():
        save_file(tensors, f"{folder}/{name}.safetensors")
    blocks = moe(lambda leaf, list: {layer + leaf: np.ascontiguousarray(interleave(leaf, np.stack(list), 1))})
    save_file(blocks, f"{folder}/experts_interleaved.safetensors", metadata={"glu_interleave": "1"})


main(sys.argv[1])
