#!/usr/bin/env python3
"""Makes tests/hf/fixtures: a tiny random transformers model of each family that braid imports, with golden values.

    tools/golden_hf.py [FAMILY ...]

Each folder holds config.json and model.safetensors as save_pretrained writes them, and golden.safetensors: tokens, logits
and the gradient of the mean next-token loss with respect to every tensor, under the names of the files (grad.NAME).
Needs torch, transformers and safetensors.
"""
import copy
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers as T
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests" / "hf" / "fixtures"
BASE = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32)


def base(**change):
    return {**BASE, **change}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
MAMBA = dict(chunk_size=4, n_groups=2)

FAMILIES = {
    "llama": lambda: T.LlamaConfig(**base(rope_parameters=LLAMA3)),
    "llama_tied": lambda: T.LlamaConfig(**base(tie_word_embeddings=True, head_dim=6)),
    "mistral": lambda: T.MistralConfig(**base(sliding_window=5)),
    "qwen2": lambda: T.Qwen2Config(**base(tie_word_embeddings=True)),
    "qwen3": lambda: T.Qwen3Config(**base(head_dim=8)),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**base(head_dim=8), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                                          mlp_only_layers=[0], norm_topk_prob=True),
    "mixtral": lambda: T.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: T.DeepseekV3Config(
        **base(num_key_value_heads=4, rope_parameters=YARN), moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=4,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, n_shared_experts=2),
    "mamba2": lambda: T.Mamba2Config(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_heads=8, head_dim=4, state_size=8,
                                     **MAMBA),
    "bamba": lambda: T.BambaConfig(**BASE, pad_token_id=None, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=4, mamba_d_state=8, mamba_n_groups=2,
                                   mamba_chunk_size=4),
    "nemotron_h": lambda: T.NemotronHConfig(
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, hybrid_override_pattern="M-*E", mamba_num_heads=8,
        mamba_head_dim=4, ssm_state_size=8, head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20, n_group=1, topk_group=1, **MAMBA),
    "qwen3_next": lambda: T.Qwen3NextConfig(
        **base(num_hidden_layers=4, head_dim=8), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        shared_expert_intermediate_size=20, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=4),
}


def saved(model, folder):
    """The tensors that save_pretrained writes, under their names on disk."""
    model.save_pretrained(folder, safe_serialization=True)
    return load_file(str(pathlib.Path(folder) / "model.safetensors"))


def make(name):
    torch.manual_seed(len(name))
    model = T.AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            # Weights large enough that every part of the model shows in the logits; norms away from their initial values.
            p.add_(torch.randn_like(p) * (0.2 if p.dim() > 1 else 0.1))
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(torch.randn_like(b) * 0.1)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    names = saved(model, folder)
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)
    tokens = torch.randint(0, 40, (2, 13))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
    loss.backward()
    # Gradients in place of the values, saved the same way: they come out under the names of the files.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters()):
            p.copy_(q.grad if q.grad is not None else torch.zeros_like(q))
    with tempfile.TemporaryDirectory() as tmp:
        grads = saved(twin, tmp)
    golden = {"tokens": tokens.int(), "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    golden.update({"grad." + k: grads[k].contiguous() for k in names if not k.endswith("e_score_correction_bias")})
    save_file(golden, str(folder / "golden.safetensors"))
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {size} bytes, loss {loss.item():.4f}")


for family in sys.argv[1:] or FAMILIES:
    make(family)
