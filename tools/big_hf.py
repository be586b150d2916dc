#!/usr/bin/env python3
"""Writes a large Llama folder of random bf16 weights in shards, to measure what an import of it needs.

    tools/big_hf.py OUT [GIGABYTES]
    /usr/bin/time -v braid import OUT runs/big     # maximum resident set size: below 600 MB for 2 GB of weights

Needs numpy alone; tensors are made and written one at a time.
"""
import json
import pathlib
import struct
import sys

import numpy as np

HIDDEN, FFN, VOCAB, SHARD = 2048, 5632, 32000, 500_000_000
# bf16 is the upper half of fp32; the same numbers again and again, for speed.
VALUES = (np.random.default_rng(1).standard_normal(1_000_003, dtype=np.float32) * np.float32(0.02)).view(np.uint32) >> 16
VALUES = VALUES.astype(np.uint16)


def shapes(layers):
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (HIDDEN,)
        for name in "qkvo":
            yield f"{at}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            yield f"{at}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_shard(path, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            out.write(np.resize(VALUES, int(np.prod(shape))).tobytes())


def main():
    out, gigabytes = pathlib.Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 2.0
    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / per_layer))
    out.mkdir(parents=True)
    shards, size = [[]], 0
    for name, shape in shapes(layers):
        bytes_ = 2 * int(np.prod(shape))
        if size + bytes_ > SHARD and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += bytes_
    index = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / file, tensors)
        index.update({name: file for name, _ in tensors})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
              "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": VOCAB, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


main()
