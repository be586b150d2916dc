#!/usr/bin/env python3
"""Compare the sparse attention of braid ('D') with Hugging Face DeepSeek-V3.2, and its indexer's loss with PyTorch.

  parity_dsa.py --braid build/braid                fresh weights, on braid's cpu device
  parity_dsa.py --braid build/braid --device ref   on its double-precision reference device

The model is that of parity_mla.py with sparse attention: selection, attention and output are the package's
(transformers.models.deepseek_v32), gradients of the model's loss are PyTorch's. The package never trains its indexer, so
the indexer's loss is written here from its definition: the KL divergence of softmax(scores) from the attention of all
heads, over all keys or over the selected ones, with everything but the indexer detached. The judge computes in float64.
Errors: of the loss, relative; of gradients, the norm of the difference over the norm, of the worst parameter.
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
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek

import parity_mla as mla

BATCH, SEQ, VOCAB = mla.BATCH, mla.SEQ, mla.VOCAB
BASE = mla.BASE | {"model.pattern": "D", "model.dsa_indexer_n_heads": 4, "model.dsa_indexer_head_dim": 12,
                   "model.dsa_indexer_topk": 9, "model.dsa_indexer_k_norm_epsilon": 1e-6,
                   "model.dsa_indexer_loss_coeff": 0.7}  # fmt: skip
SPARSE_LOSS = {"model.dsa_indexer_use_sparse_loss": "on"}
CASES = {
    "loss over all keys": {},
    "loss over selected keys": SPARSE_LOSS,
    "three layers, untied": SPARSE_LOSS | {"model.pattern": "DDD", "model.tied": "off"},
    "more selected than tokens": {"model.dsa_indexer_topk": 64},
    "one key selected": SPARSE_LOSS | {"model.dsa_indexer_topk": 1},
    "one indexer head": {"model.dsa_indexer_n_heads": 1, "model.dsa_indexer_head_dim": 8},
    "yarn": mla.YARN | SPARSE_LOSS | {"model.rope_mscale": 1, "model.rope_mscale_all_dim": 1},
}
INDEXER = {
    "core_attention.indexer.linear_wq_b.weight": "wq_b.weight",
    "core_attention.indexer.linear_wk.weight": "wk.weight",
    "core_attention.indexer.k_norm.weight": "k_norm.weight",
    "core_attention.indexer.k_norm.bias": "k_norm.bias",
    "core_attention.indexer.linear_weights_proj.weight": "weights_proj.weight",
}
NAMES = mla.NAMES | {k: "indexer." + v for k, v in INDEXER.items()}


def package_config(o):
    base = mla.package_config(o)
    config = deepseek.DeepseekV32Config(
        hidden_size=base.hidden_size, num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads, q_lora_rank=base.q_lora_rank, kv_lora_rank=base.kv_lora_rank,
        qk_nope_head_dim=base.qk_nope_head_dim, qk_rope_head_dim=base.qk_rope_head_dim, v_head_dim=base.v_head_dim,
        rope_parameters=base.rope_parameters, max_position_embeddings=base.max_position_embeddings,
        index_topk=o["model.dsa_indexer_topk"], index_head_dim=o["model.dsa_indexer_head_dim"],
        index_n_heads=o["model.dsa_indexer_n_heads"])  # fmt: skip
    config._attn_implementation = "eager"
    return config


def rotate_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def scores_of(block, h, latent, position, o):
    """The indexer's scores [B, S, S], from its definition; h and the latent have no gradient here."""
    cos, sin = position
    r, heads, dim = o["model.mla_rope"], o["model.dsa_indexer_n_heads"], o["model.dsa_indexer_head_dim"]
    p = {k: v for k, v in block.indexer.named_parameters()}
    q = (latent @ p["wq_b.weight"].T).unflatten(-1, (heads, dim))
    k = F.layer_norm(h @ p["wk.weight"].T, (dim,), p["k_norm.weight"], p["k_norm.bias"], 1e-6)
    q = torch.cat([rotate_halves(q[..., :r], cos[:, :, None], sin[:, :, None]), q[..., r:]], -1)
    k = torch.cat([rotate_halves(k[..., :r], cos, sin), k[..., r:]], -1)
    w = h @ p["weights_proj.weight"].T * (heads * dim) ** -0.5
    return torch.einsum("bth,bths->bts", w, torch.einsum("bthd,bsd->bths", q, k).relu())


def selected(scores, mask, o):
    """Keys of largest score [B, S, k]. Scores are often equal (0, where relu cuts all heads): then the smaller index."""
    order = torch.sort(scores + mask[:, 0], dim=-1, descending=True, stable=True).indices
    return order[..., : min(SEQ, o["model.dsa_indexer_topk"])]


def take_selection(block, scores, top, mask):
    """The package breaks ties at random, so it gets this selection; its own must have the same scores."""
    package = block.indexer.forward

    def forward(*args, **kwargs):
        own = package(*args, **kwargs).long()
        s = (scores + mask[:, 0]).clamp_min(-1e9)
        torch.testing.assert_close(s.gather(-1, own).sort(-1).values, s.gather(-1, top).sort(-1).values, rtol=1e-4, atol=1e-5)
        return top.to(torch.int32)

    block.indexer.forward = forward


def indexer_loss(scores, weights, top, o):
    """weights [B, H, S, S]: attention of every head over the keys that the loss goes over."""
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    if o.get("model.dsa_indexer_use_sparse_loss") == "on":
        seen = seen & torch.zeros_like(seen).scatter(-1, top, True)
    target = weights.detach().sum(1)
    target = target / target.sum(-1, keepdim=True)
    logs = torch.log_softmax(scores.masked_fill(~seen, float("-inf")), -1)
    terms = torch.where(seen & (target > 0), target * (target.clamp_min(1e-300).log() - logs.masked_fill(~seen, 0)), 0.0)
    return o["model.dsa_indexer_loss_coeff"] * terms.sum(-1).mean()


def attention_of(block, h, latent, position, o, mask):
    """Attention weights of every head where the mask allows, from the package's parts."""
    n, r, rank = o["model.mla_nope"], o["model.mla_rope"], o["model.mla_kv_rank"]
    q = block.q_b_proj(latent).unflatten(-1, (o["model.heads"], n + r)).transpose(1, 2)
    down = block.kv_a_proj_with_mqa(h)
    q_rot, k_rot = deepseek.apply_rotary_pos_emb_interleave(q[..., n:], down[:, None, :, rank:], *position)
    kv = block.kv_b_proj(block.kv_a_layernorm(down[..., :rank])).unflatten(-1, (o["model.heads"], n + o["model.mla_v"]))
    k = torch.cat([kv.transpose(1, 2)[..., :n], k_rot.expand(-1, o["model.heads"], -1, -1)], -1)
    q = torch.cat([q[..., :n], q_rot], -1)
    return torch.softmax(q @ k.transpose(-1, -2) * block.scaling + mask, -1)


def package_model(o, params, tokens, labels, dtype):
    """The model's loss, the indexers' loss, and gradients of both by braid's key."""
    p = {k: v.to(dtype).clone().requires_grad_() for k, v in params.items()}
    config = package_config(o)
    mask = torch.full((SEQ, SEQ), float("-inf"), dtype=dtype).triu(1)[None, None].expand(BATCH, -1, -1, -1)
    x = p["embedding.word_embeddings.weight"][tokens]
    position = deepseek.DeepseekV32RotaryEmbedding(config)(x, torch.arange(SEQ)[None])
    blocks, extra = [], 0
    for i in range(len(o["model.pattern"])):
        layer = f"decoder.layers.{i}."
        block = deepseek.DeepseekV32Attention(config, i).to(dtype)
        own = dict(block.named_parameters())
        with torch.no_grad():
            for key, name in NAMES.items():
                if name in own:
                    own[name].copy_(p[layer + "self_attention." + key])
        h = mla.norm(x, p[layer + "input_layernorm.weight"])
        latent = block.q_a_layernorm(block.q_a_proj(h))
        scores = scores_of(block, h.detach(), latent.detach(), position, o)
        top, limit = selected(scores.detach(), mask, o), mask
        take_selection(block, scores.detach(), top, mask)
        if o.get("model.dsa_indexer_use_sparse_loss") == "on":
            limit = mask + torch.full_like(mask, float("-inf")).scatter(-1, top[:, None], 0.0)
        with torch.no_grad():
            weights = attention_of(block, h, latent, position, o, limit)
        extra = extra + indexer_loss(scores, weights, top, o)
        x = x + block(h, position, mask)[0]
        blocks.append((layer, own))
    head = p["output_layer.weight" if o.get("model.tied") == "off" else "embedding.word_embeddings.weight"]
    logits = mla.norm(x, p["decoder.final_norm.weight"]) @ head.T
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-1)
    (loss + extra).backward()
    grads = {k: v.grad for k, v in p.items() if v.grad is not None}
    for layer, own in blocks:
        grads |= {layer + "self_attention." + key: own[name].grad for key, name in NAMES.items() if name in own}
    return loss.item(), grads


def judge(o, params, tokens, labels):
    deepseek.torch = modeling_rope_utils.torch = mla.InDouble()
    try:
        return package_model(o, params, tokens, labels, torch.float64)
    finally:
        deepseek.torch = modeling_rope_utils.torch = torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--device", default="cpu", choices=sorted(mla.LIMITS))
    args = parser.parse_args()
    args.trained = False
    torch.set_num_threads(1)
    failed = 0
    print(f"{'case':28} {'loss':>8} {'braid: loss':>12} {'gradient':>9}  worst of braid")
    for case, changes in CASES.items():
        torch.manual_seed(3)
        o = BASE | changes
        with tempfile.TemporaryDirectory() as tmp:
            tokens, labels, out = mla.braid(args, o, tmp)
        params = {k[6:]: v for k, v in out.items() if k.startswith("param.")}
        loss, exact = judge(o, params, tokens, labels)
        grads = {k[5:]: v for k, v in out.items() if k.startswith("grad.")}
        error, where = mla.worst(grads, exact)
        loss_error = abs(out["loss"].item() - loss) / loss
        unknown = sorted(set(grads) - set(exact))
        limits = mla.LIMITS[args.device]
        bad = not (loss_error <= limits[0] and error <= limits[1]) or unknown
        failed += bool(bad)
        print(f"{case:28} {loss:8.5f} {loss_error:12.1e} {error:9.1e}  {where}{' FAILED' if bad else ''} {unknown or ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
