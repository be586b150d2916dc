#!/usr/bin/env python3
"""Compare models of the shape of DeepSeek-V4 with Hugging Face's: all of one, from the embedding to every gradient.

  parity_dsv4.py --braid build/braid                fresh weights, on braid's cpu device
  parity_dsv4.py --braid build/braid --device ref   on its double-precision reference device

Attention over windows and compressed entries, hyper-connections, routing by tables and by sqrtsoftplus, clamped experts and the
contraction are the package's (transformers.models.deepseek_v4), the depth of multi-token prediction is that of golden_hf.py, built of
the package's parts. The judge is the package in float64: where it asks for float32 it gets float64, which changes rounding and
nothing else. The package never trains its indexers, so their gradients are not compared. Fresh weights are large (init_std 0.2),
so that every part shows; gates of hyper-connections start at 1, and biases that start at 0 stay there: the fixtures of
tests/hf have them at random.
Errors: of the loss, relative; of gradients, the norm of the difference over the norm, of the worst parameter.
"""
import argparse
import sys
import tempfile

import torch
import torch.nn.functional as F
from transformers import modeling_rope_utils
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

import golden_hf
import parity_mla as mla

BATCH, SEQ, VOCAB = mla.BATCH, mla.SEQ, mla.VOCAB
LIMITS = {"cpu": (1e-6, 1e-4), "ref": (1e-12, 1e-11)}
BASE = {"model.pattern": "[WE][CE][HE]", "model.hidden": 24, "model.heads": 4, "model.vocab": VOCAB, "model.vocab_multiple": 1,
        "model.tied": "off", "model.norm_eps": 1e-6, "model.mla_q_rank": 20, "model.mla_v": 12, "model.mla_rope": 4,
        "model.csa_window_size": 7, "model.compress_rate_csa": 4, "model.compress_rate_hca": 8, "model.o_groups": 2,
        "model.o_lora_rank": 10, "model.dsa_indexer_n_heads": 8, "model.dsa_indexer_head_dim": 8, "model.dsa_indexer_topk": 3,
        "model.experts": 6, "model.topk": 2, "model.expert_ffn": 16, "model.shared_ffn": 16, "model.act": "swiglu",
        "model.act_clamp": 0.4, "model.router_score": "sqrtsoftplus", "model.router_bias": "on", "model.router_scale": 1.5,
        "model.router_hash_layers": 2, "model.mhc_streams": 4, "model.mhc_gating": 1, "model.mhc_norm_eps_inside": "on",
        "model.init_std": 0.2, "model.mtp_scale": golden_hf.MTP_SCALE, "train.seq": SEQ, "train.micro_batch": BATCH,
        "run.threads": 1}  # fmt: skip
NO_TABLE = {"model.router_hash_layers": 0}
YARN = {"model.rope_scaling": "yarn", "model.rope_factor": 4, "model.rope_original": 16, "model.rope_beta_fast": 32}
CASES = {
    "window": {"model.pattern": "[WE]"},
    "window alone, no table": {"model.pattern": "[WE]"} | NO_TABLE,
    "heavily compressed": {"model.pattern": "[HE]"} | NO_TABLE,
    "compressed, selected": {"model.pattern": "[CE]"} | NO_TABLE,
    "compressed, all selected": {"model.pattern": "[CE]", "model.dsa_indexer_topk": 64} | NO_TABLE,
    "all kinds": {},
    "all kinds, yarn": YARN,
    "two streams, one group": {"model.mhc_streams": 2, "model.o_groups": 1, "model.mhc_iterations": 3},
    "window of all tokens": {"model.csa_window_size": 64},
    "window of one token": {"model.csa_window_size": 1},
    "prediction": {"model.pattern": "[WE][CE]/WE"},
}
KINDS = dict(zip("WCH", golden_hf.V4_KINDS))

# braid's keys of a layer and the package's names
NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_norm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_proj.weight": "self_attn.kv_proj.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_norm.weight",
    "self_attention.core_attention.attn_sink": "self_attn.sinks",
    "self_attention.linear_o_group_proj": "self_attn.o_a_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_b_proj.weight",
    "self_attention.core_attention.compressor.linear_wkv.weight": "self_attn.compressor.kv_proj.weight",
    "self_attention.core_attention.compressor.linear_wgate.weight": "self_attn.compressor.gate_proj.weight",
    "self_attention.core_attention.compressor.ape": "self_attn.compressor.position_bias",
    "self_attention.core_attention.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "self_attention.core_attention.indexer.linear_wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "self_attention.core_attention.indexer.linear_weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "self_attention.core_attention.indexer.compressor.linear_wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "self_attention.core_attention.indexer.compressor.linear_wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "self_attention.core_attention.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "self_attention.core_attention.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "self_attention_hyper_connection.mapping_proj.weight": "attn_hc.fn",
    "self_attention_hyper_connection.bias": "attn_hc.base",
    "mlp_hyper_connection.mapping_proj.weight": "ffn_hc.fn",
    "mlp_hyper_connection.bias": "ffn_hc.base",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.router.tid2eid": "mlp.gate.tid2eid",
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
ENDS = {
    "embedding.word_embeddings.weight": "model.model.embed_tokens.weight",
    "output_layer.weight": "model.lm_head.weight",
    "decoder.final_layernorm.weight": "model.model.norm.weight",
    "decoder.hc_head_fn": "model.model.hc_head.hc_fn",
    "decoder.hc_head_base": "model.model.hc_head.hc_base",
    "decoder.hc_head_scale": "model.model.hc_head.hc_scale",
    "mtp.layers.0.final_layernorm.weight": "norm.weight",
    "mtp.layers.0.enorm.weight": "enorm.weight",
    "mtp.layers.0.hnorm.weight": "hnorm.weight",
    "mtp.layers.0.e_proj.weight": "e_proj.weight",
    "mtp.layers.0.h_proj.weight": "h_proj.weight",
    "mtp.layers.0.hc_head_fn": "hc_head.hc_fn",
    "mtp.layers.0.hc_head_base": "hc_head.hc_base",
    "mtp.layers.0.hc_head_scale": "hc_head.hc_scale",
}


class Alone(torch.nn.Module):
    """A model without prediction, with names as Prediction has them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, use_cache=False).logits, None


def layers_of(o):
    main, *depths = o["model.pattern"].split("/")
    return [s[0] for s in main.strip("[]").split("][")] + [d[0] for d in depths], len(depths)


def package_config(o):
    kinds, depths = layers_of(o)
    rope = {}
    if o.get("model.rope_scaling") == "yarn":
        rope = {"rope_type": "yarn", "factor": float(o["model.rope_factor"]), "beta_fast": float(o["model.rope_beta_fast"]),
                "beta_slow": 1.0, "original_max_position_embeddings": o["model.rope_original"]}  # fmt: skip
    config = deepseek.DeepseekV4Config(
        vocab_size=VOCAB, hidden_size=o["model.hidden"], moe_intermediate_size=o["model.expert_ffn"],
        num_hidden_layers=len(kinds), num_attention_heads=o["model.heads"], head_dim=o["model.mla_v"],
        qk_rope_head_dim=o["model.mla_rope"], q_lora_rank=o["model.mla_q_rank"], n_routed_experts=o["model.experts"],
        num_experts_per_tok=o["model.topk"], routed_scaling_factor=o["model.router_scale"], max_position_embeddings=64,
        layer_types=[KINDS[k] for k in kinds], sliding_window=o["model.csa_window_size"],
        compress_rates={KINDS["C"]: o["model.compress_rate_csa"], KINDS["H"]: o["model.compress_rate_hca"]},
        num_hash_layers=o["model.router_hash_layers"] // 2, o_groups=o["model.o_groups"], o_lora_rank=o["model.o_lora_rank"],
        index_n_heads=o["model.dsa_indexer_n_heads"], index_head_dim=o["model.dsa_indexer_head_dim"],
        index_topk=o["model.dsa_indexer_topk"], swiglu_limit=o["model.act_clamp"], hc_mult=o["model.mhc_streams"],
        hc_sinkhorn_iters=o.get("model.mhc_iterations", 20), rope_parameters=rope)  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    return config, depths


def named(o, key):
    """The package's name of braid's key, and which part of that tensor it is."""
    if key in ENDS:
        return ENDS[key], ...
    kinds, depths = layers_of(o)
    number, rest = key.split("layers.")[-1].split(".", 1)
    if key.startswith("mtp."):
        number = len(kinds) - depths
    at = f"model.model.layers.{number}."
    if "alpha_" in rest:
        module = "attn_hc" if rest.startswith("self_attention") else "ffn_hc"
        i = ("alpha_pre", "alpha_post", "alpha_res").index(rest.split(".")[-1])
        return at + module + ".scale", slice(i, i + 1)
    return at + NAMES[rest], ...


def parts(o, key, own):
    """The tensors of the package that braid's one is made of, in order."""
    if key.endswith("shared_experts.linear_fc1.weight"):
        fc2 = named(o, key.replace("linear_fc1", "linear_fc2"))[0]
        return [own[fc2.replace("down_proj", what)] for what in ("gate_proj", "up_proj")], ...
    name, part = named(o, key)
    return [own[name]], part


def package_model(o, params, tokens, labels, dtype):
    """Loss, and gradients by braid's key."""
    config, depths = package_config(o)
    inner = deepseek.DeepseekV4ForCausalLM(config)
    model = (golden_hf.StreamPrediction(inner) if depths else Alone(inner)).to(dtype).eval()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for key, value in params.items():
            tensors, part = parts(o, key, own)
            for t, v in zip(tensors, value.chunk(len(tensors))):
                t[part].copy_(v.reshape(t[part].shape))
    with golden_hf.clear_selection(inner, all_selected=o["model.dsa_indexer_topk"] > SEQ):
        logits, further = model(tokens)
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-1)
    total = loss
    if further is not None:
        later = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -1)], 1)
        total = loss + o["model.mtp_scale"] * F.cross_entropy(further.reshape(-1, VOCAB), later.reshape(-1), ignore_index=-1)
    total.backward()
    grads = {}
    for key in params:
        tensors, part = parts(o, key, own)
        if tensors[0].requires_grad and ".indexer." not in key:
            grads[key] = torch.cat([t.grad[part] for t in tensors]).reshape(params[key].shape)
    return loss.item(), grads


def whole(o, grads):
    """Gradients by the package's tensor: a scale of hyper-connections is three of braid's parameters, and one of them may have no
    gradient but rounding, since the streams of the first layer are all the same."""
    out = {}
    for key in sorted(grads):
        name = named(o, key)[0] if "linear_fc1" not in key else key
        out[name] = torch.cat([out[name], grads[key].double().flatten()]) if name in out else grads[key].double().flatten()
    return out


def judge(o, params, tokens, labels):
    narrow = torch.Tensor.float
    deepseek.torch = modeling_rope_utils.torch = mla.InDouble()
    torch.Tensor.float = torch.Tensor.double
    try:
        return package_model(o, params, tokens, labels, torch.float64)
    finally:
        deepseek.torch = modeling_rope_utils.torch = torch
        torch.Tensor.float = narrow


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--device", default="cpu", choices=sorted(LIMITS))
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
        grads = {k[5:]: v for k, v in out.items() if k.startswith("grad.") and ".indexer." not in k}
        grads, exact = whole(o, grads), {k: g for k, g in whole(o, exact).items() if g.norm() > 0}
        error, where = mla.worst(grads, exact)
        loss_error = abs(out["loss"].item() - loss) / loss
        unknown = sorted(k for k in set(grads) - set(exact) if grads[k].norm() > 0)
        limits = LIMITS[args.device]
        bad = not (loss_error <= limits[0] and error <= limits[1]) or unknown
        failed += bool(bad)
        print(f"{case:28} {loss:8.5f} {loss_error:12.1e} {error:9.1e}  {where}{' FAILED' if bad else ''} {unknown or ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
