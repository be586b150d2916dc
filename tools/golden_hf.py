#!/usr/bin/env python3
"""Makes tests/hf/fixtures: a tiny random transformers model of each family that braid imports, with golden values.

    tools/golden_hf.py [FAMILY ...]

Each folder holds config.json and model.safetensors as save_pretrained writes them, and golden.safetensors: tokens, logits
and the gradient of the mean next-token loss with respect to every tensor, under the names of the files (grad.NAME).
deepseek_v4 is under the names of its release. Those that end in _mtp have one depth of multi-token prediction, which transformers' models leave out: it is built here of one
more layer of the class, and its loss is part of the objective with braid's default weight. tests/hf/variants holds folders that
are only read: quantised weights, and GPT-2 under the names of its base class.
Needs torch, transformers and safetensors.
"""
import contextlib
import copy
import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers as T
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests" / "hf" / "fixtures"
VARIANTS = HERE.parent / "variants"
MTP_SCALE = 0.1  # model.mtp_scale
BASE = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32)


def base(**change):
    return {**BASE, **change}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
MAMBA = dict(chunk_size=4, n_groups=2)
OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False}

FAMILIES = {
    "llama": lambda: T.LlamaConfig(**base(rope_parameters=LLAMA3)),
    "llama_tied": lambda: T.LlamaConfig(**base(tie_word_embeddings=True, head_dim=6)),
    "llama_bias": lambda: T.LlamaConfig(**base(attention_bias=True, mlp_bias=True)),
    "gpt2": lambda: T.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=24, resid_pdrop=0.0, embd_pdrop=0.0,
                                 attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    "olmoe": lambda: T.OlmoeConfig(**base(intermediate_size=12), num_experts=4, num_experts_per_tok=2, pad_token_id=None,
                                   eos_token_id=None),
    "gpt_oss": lambda: T.GptOssConfig(**base(head_dim=8, intermediate_size=12, rope_parameters=OSS_YARN, num_hidden_layers=2),
                                      num_local_experts=4, num_experts_per_tok=2, sliding_window=5, swiglu_limit=1.0),
    "mistral": lambda: T.MistralConfig(**base(sliding_window=5)),
    "qwen2": lambda: T.Qwen2Config(**base(tie_word_embeddings=True)),
    "qwen3": lambda: T.Qwen3Config(**base(head_dim=8)),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**base(head_dim=8), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                                          mlp_only_layers=[0], norm_topk_prob=True),
    "mixtral": lambda: T.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: deepseek(),
    "deepseek_v32": lambda: deepseek(T.DeepseekV32Config, index_n_heads=8, index_head_dim=8, index_topk=5),
    "deepseek_v4": lambda: deepseek_v4(),
    "mamba2": lambda: T.Mamba2Config(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_heads=8, head_dim=4, state_size=8,
                                     **MAMBA),
    "bamba": lambda: T.BambaConfig(**BASE, pad_token_id=None, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=4, mamba_d_state=8, mamba_n_groups=2,
                                   mamba_chunk_size=4),
    "nemotron_h": lambda: T.NemotronHConfig(
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, hybrid_override_pattern="M-*E", mamba_num_heads=8,
        mamba_head_dim=4, ssm_state_size=8, head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20, n_group=1, topk_group=1, **MAMBA),
    "qwen3_next": lambda: qwen3_next(),
}


def deepseek(kind=None, **change):
    # A token takes one expert of a group on average, yet the class scores a group by its two best.
    fields = dict(moe_intermediate_size=12, n_routed_experts=12, num_experts_per_tok=2, n_group=3, topk_group=2,
                  first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
                  n_shared_experts=2)
    return (kind or T.DeepseekV3Config)(**{**base(num_key_value_heads=4, rope_parameters=YARN), **fields, **change})


# A sequence of deepseek_v4 is longer than the window, and has more entries than the indexer selects; its last window is incomplete.
V4_TOKENS = 30
V4_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
V4_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def deepseek_v4(kinds=V4_KINDS, **change):
    fields = dict(vocab_size=40, hidden_size=16, moe_intermediate_size=12, num_attention_heads=4, head_dim=8, qk_rope_head_dim=4,
                  q_lora_rank=12, n_routed_experts=4, num_experts_per_tok=2, max_position_embeddings=32, num_hash_layers=1,
                  compress_rates={V4_KINDS[1]: 4, V4_KINDS[2]: 8}, sliding_window=5, o_groups=2, o_lora_rank=6, index_n_heads=8,
                  index_head_dim=8, index_topk=3, swiglu_limit=0.5, rope_parameters=V4_YARN, num_nextn_predict_layers=0)
    return T.DeepseekV4Config(**{**fields, "layer_types": kinds, "num_hidden_layers": len(kinds), **change})


def qwen3_next(**change):
    fields = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20,
                  linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4)
    return T.Qwen3NextConfig(**{**base(num_hidden_layers=4, head_dim=8), **fields, **change})


def released_name(key):
    """save_pretrained of deepseek_v4 undoes not all of its renames: the names of the release, which it reads as well."""
    key = key.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return key.replace(".attn.norm.", ".attn.kv_norm.")


def saved(model, folder):
    """The tensors that save_pretrained writes, under their names on disk."""
    model.save_pretrained(folder, safe_serialization=True)
    path = str(pathlib.Path(folder) / "model.safetensors")
    tensors = load_file(path)
    if model.config.model_type == "deepseek_v4":
        tensors = {released_name(k): v for k, v in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def randomise(model):
    with torch.no_grad():
        for key, p in model.named_parameters():
            # Weights large enough that every part of the model shows in the logits; norms away from their initial values.
            p.add_(torch.randn_like(p) * (0.2 if p.dim() > 1 else 0.1))
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(torch.randn_like(b) * 0.1)
            if key.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                b.copy_(torch.stack([torch.randperm(experts)[: b.shape[1]] for _ in range(b.shape[0])]))


def build(config, name):
    torch.manual_seed(len(name))
    model = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomise(model)
    return model


def next_token_loss(logits, tokens, ahead=1):
    return torch.nn.functional.cross_entropy(logits[:, :-ahead].reshape(-1, logits.shape[-1]), tokens[:, ahead:].reshape(-1))


def gradients(model):
    """Gradients in place of the values, saved the same way: they come out under the names of the files."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters()):
            p.copy_(q.grad if q.grad is not None else torch.zeros_like(q))
    with tempfile.TemporaryDirectory() as tmp:
        return saved(twin, tmp)


@contextlib.contextmanager
def clear_selection(model, all_selected=False):
    """torch.topk promises nothing of equal scores: those of an indexer of deepseek_v4 must differ where they decide, and some
    entries must be left out unless all may be selected."""

    def look(scorer, args, scores):
        k = model.config.index_topk
        for row in range(scores.shape[1]):
            visible = (row + 1) // model.config.compress_rates["compressed_sparse_attention"]
            s = scores[:, row, :visible].sort(descending=True).values
            assert visible <= k or (s[:, k - 1] - s[:, k] > 1e-4).all(), f"row {row}: scores {s}"
        assert all_selected or scores.shape[2] > k, "every entry is selected"

    scorers = [m for m in model.modules() if type(m).__name__ == "DeepseekV4IndexerScorer"]
    hooks = [s.register_forward_hook(look) for s in scorers]
    yield
    for h in hooks:
        h.remove()


def write_golden(folder, tokens, logits, loss, grads):
    golden = {"tokens": tokens.int(), "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    untrained = ("e_score_correction_bias", ".gate.bias", "tid2eid")
    golden.update({"grad." + k: v.contiguous() for k, v in grads.items() if not k.endswith(untrained)})
    save_file(golden, str(folder / "golden.safetensors"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name}: {size} bytes, loss {loss.item():.4f}")


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def make(name):
    model = build(FAMILIES[name](), name)
    folder = fresh(HERE / name)
    saved(model, folder)
    tokens = torch.randint(0, 40, (2, V4_TOKENS if name == "deepseek_v4" else 13))
    with clear_selection(model):
        logits = model(tokens).logits
    loss = next_token_loss(logits, tokens)
    loss.backward()
    write_golden(folder, tokens, logits, loss, gradients(model))
    same, info = T.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    assert torch.allclose(same.float().eval()(tokens).logits, logits, atol=1e-5)


# ---- multi-token prediction ---------------------------------------------------------------------------------------------


class Prediction(torch.nn.Module):
    """A model of n + 1 layers used as n layers and one depth of multi-token prediction."""

    def __init__(self, model):
        super().__init__()
        d, norm = model.config.hidden_size, type(model.model.norm)
        self.model = model
        self.enorm, self.hnorm, self.norm = norm(d), norm(d), norm(d)
        for m in (self.enorm, self.hnorm, self.norm):
            vars(m).update({k: v for k, v in vars(model.model.norm).items() if k.endswith("eps") or k == "variance_epsilon"})
        self.eh_proj = torch.nn.Linear(2 * d, d, bias=False)

    def forward(self, tokens):
        inner = self.model.model
        h = inner.embed_tokens(tokens)
        pos = torch.arange(tokens.shape[1]).unsqueeze(0)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rotary = inner.rotary_emb(h, pos)

        def run(layer, x):
            linear = hasattr(layer, "linear_attn")
            out = layer(x, position_embeddings=rotary, attention_mask=None if linear else mask, position_ids=pos)
            return out[0] if isinstance(out, tuple) else out

        for layer in inner.layers[:-1]:
            h = run(layer, h)
        h = inner.norm(h)
        following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
        x = self.eh_proj(torch.cat([self.enorm(inner.embed_tokens(following)), self.hnorm(h)], dim=-1))
        return self.model.lm_head(h), self.model.lm_head(self.norm(run(inner.layers[-1], x)))


def make_mtp(name):
    deep = name.startswith("deepseek")
    n = 1
    config = deepseek(num_hidden_layers=n + 1, n_routed_experts=6, n_group=2) if deep else qwen3_next(num_hidden_layers=n + 1, layer_types=["linear_attention", "full_attention"])
    model = Prediction(build(config, name))
    randomise(model)
    tokens = torch.randint(0, 40, (2, 13))
    logits, further = model(tokens)
    loss = next_token_loss(logits, tokens)
    (loss + MTP_SCALE * next_token_loss(further, tokens, 2)).backward()
    folder = fresh(HERE / name)

    def named(values, grads):
        at = f"model.layers.{n}."
        out = {k if deep or not k.startswith(at) else "mtp.layers.0." + k[len(at):]: v for k, v in values.items()}
        own = {"enorm": (at + "enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
               "hnorm": (at + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
               "eh_proj": (at + "eh_proj.weight", "mtp.fc.weight"), "norm": (at + "shared_head.norm.weight", "mtp.norm.weight")}
        for module, names in own.items():
            p = getattr(model, module).weight
            out[names[0 if deep else 1]] = (p.grad if grads else p.detach()).clone()
        if deep and not grads:
            out[at + "embed_tokens.weight"] = out["model.embed_tokens.weight"].clone()
            out[at + "shared_head.head.weight"] = out["lm_head.weight"].clone()
        return {k: v.contiguous() for k, v in out.items()}

    save_file(named(saved(model.model, folder), False), str(folder / "model.safetensors"), metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields.update(num_hidden_layers=n, num_nextn_predict_layers=1)
    if not deep:
        fields["layer_types"] = fields["layer_types"][:n]
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    write_golden(folder, tokens, logits, loss, named(gradients(model.model), True))


class StreamPrediction(torch.nn.Module):
    """The same with deepseek_v4's streams: a depth takes them before they are contracted, and contracts its own."""

    def __init__(self, model):
        super().__init__()
        d, inner = model.config.hidden_size, model.model
        self.model = model
        self.enorm, self.hnorm, self.norm = (type(inner.norm)(d, eps=model.config.rms_norm_eps) for _ in range(3))
        self.e_proj, self.h_proj = (torch.nn.Linear(d, d, bias=False) for _ in range(2))
        self.hc_head = type(inner.hc_head)(model.config)
        for p in self.hc_head.parameters():
            torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        inner, seq = self.model.model, tokens.shape[1]
        e = inner.embed_tokens(tokens)
        pos = torch.arange(seq).unsqueeze(0)
        far = torch.arange(seq)[:, None] - torch.arange(seq)[None] >= self.model.config.sliding_window
        mask = torch.zeros(seq, seq).masked_fill(far | torch.ones(seq, seq).triu(1).bool(), float("-inf")).expand(tokens.shape[0], 1, seq, seq)
        rotary = {k: inner.rotary_emb(e, position_ids=pos, layer_type=k) for k in ("main", "compress")}

        def run(layer, x):
            return layer(x, position_embeddings=rotary, position_ids=pos, attention_mask=mask, input_ids=tokens, past_key_values=None)

        h = e.unsqueeze(2).expand(-1, -1, self.model.config.hc_mult, -1).contiguous()
        for layer in inner.layers[:-1]:
            h = run(layer, h)
        following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
        x = self.e_proj(self.enorm(inner.embed_tokens(following))).unsqueeze(2) + self.h_proj(self.hnorm(h))
        further = self.norm(self.hc_head(run(inner.layers[-1], x)))
        return self.model.lm_head(inner.norm(inner.hc_head(h))), self.model.lm_head(further)


def make_v4_mtp(name):
    kinds = [V4_KINDS[1], V4_KINDS[0]]
    config = deepseek_v4(kinds, num_hash_layers=0)
    model = StreamPrediction(build(config, name))
    randomise(model)
    tokens = torch.randint(0, 40, (2, V4_TOKENS))
    with clear_selection(model.model):
        logits, further = model(tokens)
    loss = next_token_loss(logits, tokens)
    (loss + MTP_SCALE * next_token_loss(further, tokens, 2)).backward()
    folder = fresh(HERE / name)

    def named(values, grads):
        at = f"layers.{len(kinds) - 1}."
        out = {k if not k.startswith(at) else "mtp.0." + k[len(at):]: v for k, v in values.items()}
        for key, p in model.named_parameters():
            if not key.startswith("model."):
                out["mtp.0." + key.replace("hc_head.hc_", "hc_head_")] = (p.grad if grads else p.detach()).clone()
        return {k: v.contiguous() for k, v in out.items()}

    save_file(named(saved(model.model, folder), False), str(folder / "model.safetensors"), metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields.update(num_hidden_layers=1, num_nextn_predict_layers=1, layer_types=kinds[:1], mlp_layer_types=["moe"])
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    same, info = T.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    assert torch.allclose(same.eval()(tokens).logits, logits, atol=1e-5)
    write_golden(folder, tokens, logits, loss, named(gradients(model.model), True))


# ---- folders that are only read -----------------------------------------------------------------------------------------


def quantised(name, config, quantise, quantization_config, fields_of=lambda fields: fields):
    """quantise(key, parameter): the tensors that stand for a parameter on disk and its value, or None."""
    model = build(config, name)
    folder = fresh(VARIANTS / name)
    values = saved(model, folder)
    stored = {}
    for key, value in values.items():
        made = quantise(key, value)
        stored.update(made[0] if made else {key: value})
        if made:
            values[key] = made[1]
    with tempfile.TemporaryDirectory() as tmp:
        save_file(values, tmp + "/model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "config.json", tmp)
        model = T.AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, 40, (2, 13))
    logits = model(tokens).logits
    loss = next_token_loss(logits, tokens)
    loss.backward()
    save_file({k: v.contiguous() for k, v in stored.items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    fields = fields_of(json.loads((folder / "config.json").read_text()))
    fields["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    write_golden(folder, tokens, logits, loss, gradients(model))


def mxfp4(key, value):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if not key.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, inputs, outputs = value.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {key + "_blocks": blocks, key + "_scales": scales}, plain.contiguous()


def fp8(key, value):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    if not key.endswith("_proj.weight") and not key.endswith("_with_mqa.weight"):
        return None
    rows, cols = value.shape
    scale = torch.rand((rows + 127) // 128, (cols + 127) // 128) * 0.01 + 0.005
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    codes = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    plain = codes.float() * spread
    assert torch.equal(plain, Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32))
    return {key: codes, key + "_scale_inv": scale}, plain


def v4_codes(key, value):
    """As in the release of DeepSeek-V4-Flash: FP8 blocks, experts as pairs of FP4 in a byte, scales that are powers of two."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    projections = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight")
    experts = ".ffn.experts." in key
    if not experts and ".shared_experts." not in key and not key.endswith(projections):
        return None
    rows, cols = value.shape
    if experts:
        codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8).view(torch.int8)
        scale = torch.randint(122, 126, (rows, cols // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    else:
        assert max(rows, cols) <= 128
        scale = torch.randint(117, 120, (1, 1), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        codes = (value / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    plain = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    return {key: codes, key.removesuffix("weight") + "scale": scale}, plain


def v4_release(fields):
    """config.json as DeepSeek-V4 was released: other fields say the same."""
    for field in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        del fields[field]
    scaling = {**V4_YARN, "type": "yarn"}
    del scaling["rope_type"]
    return {**fields, "compress_ratios": [4, 0], "num_hash_layers": 1, "topk_method": "noaux_tc", "rope_scaling": scaling, "expert_dtype": "fp4"}


def make_v4_saved(name):
    """Names as save_pretrained writes them."""
    model = build(deepseek_v4(V4_KINDS[:1]), name)
    folder = fresh(VARIANTS / name)
    model.save_pretrained(folder)
    tokens = torch.randint(0, 40, (2, 13))
    logits = model(tokens).logits
    write_golden(folder, tokens, logits, next_token_loss(logits, tokens), {})


def make_bare(name):
    """GPT-2's own folder has no "transformer." before its names, and no head."""
    folder = fresh(VARIANTS / name)
    values = load_file(str(HERE / "gpt2" / "model.safetensors"))
    save_file({k.removeprefix("transformer."): v for k, v in values.items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    shutil.copy(HERE / "gpt2" / "config.json", folder)
    golden = load_file(str(HERE / "gpt2" / "golden.safetensors"))
    save_file({k: v for k, v in golden.items() if not k.startswith("grad.")}, str(folder / "golden.safetensors"))
    print(f"{name}: written")


OTHERS = {
    "deepseek_v3_mtp": lambda: make_mtp("deepseek_v3_mtp"),
    "qwen3_next_mtp": lambda: make_mtp("qwen3_next_mtp"),
    "deepseek_v4_mtp": lambda: make_v4_mtp("deepseek_v4_mtp"),
    "gpt_oss_mxfp4": lambda: quantised(
        "gpt_oss_mxfp4", T.GptOssConfig(**base(hidden_size=32, head_dim=8, intermediate_size=32, rope_parameters=OSS_YARN, num_hidden_layers=1),
                                        num_local_experts=4, num_experts_per_tok=2, sliding_window=5, layer_types=["sliding_attention"]),
        mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}),
    "deepseek_v3_fp8": lambda: quantised(
        "deepseek_v3_fp8", deepseek(intermediate_size=256, n_routed_experts=6, n_group=2), fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "deepseek_v4_codes": lambda: quantised(
        "deepseek_v4_codes", deepseek_v4(V4_KINDS[1:2], hidden_size=32, moe_intermediate_size=32), v4_codes,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        v4_release),
    "deepseek_v4_saved": lambda: make_v4_saved("deepseek_v4_saved"),
    "gpt2_bare": lambda: make_bare("gpt2_bare"),
}

if __name__ == "__main__":
    for family in sys.argv[1:] or [*FAMILIES, *OTHERS]:
        OTHERS[family]() if family in OTHERS else make(family)
