#!/usr/bin/env python3
"""Compare a mixture-of-experts layer of braid with the Hugging Face blocks of Qwen3-MoE and DeepSeek-V3.

  parity_moe.py --braid build/braid                fresh weights, on braid's cpu device
  parity_moe.py --braid build/braid --device ref   on its double-precision reference device
  parity_moe.py --braid build/braid --trained      weights of a short run, where the expert bias is not 0

The model is embedding, RMSNorm, the block, residual, RMSNorm, tied head. `braid grads` computes loss and all
gradients for random tokens and writes its parameters; PyTorch takes them over and its block is the one of the
transformers package. Columns: loss, and the largest difference of a gradient over the largest gradient of that
parameter. PyTorch computes in float32, its routers always do.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

D, FFN, VOCAB, BATCH, SEQ = 64, 48, 256, 3, 40
BASE = {"model.pattern": "E", "model.hidden": D, "model.heads": 2, "model.vocab": VOCAB, "model.expert_ffn": FFN,
        "model.init_std": 0.2, "model.norm_eps": 1e-6, "train.seq": SEQ, "train.micro_batch": BATCH}  # fmt: skip
LAYER = "decoder.layers.0."


def qwen_block(normalise):
    config = qwen.Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=FFN, num_experts=16, num_experts_per_tok=4,
                                 norm_topk_prob=normalise, hidden_act="silu")  # fmt: skip
    config._experts_implementation = "eager"
    return qwen.Qwen3MoeSparseMoeBlock(config)


def deepseek_block(groups, group_topk, normalise=True):
    config = deepseek.DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=FFN, n_routed_experts=16, num_local_experts=16, num_experts_per_tok=4,
        n_group=groups, topk_group=group_topk, norm_topk_prob=normalise, routed_scaling_factor=2.5, n_shared_experts=1,
        hidden_act="silu")  # fmt: skip
    config._experts_implementation = "eager"
    return deepseek.DeepseekV3MoE(config)


CASES = {
    "qwen3, normalised": ({"model.experts": 16, "model.topk": 4}, lambda: qwen_block(True)),
    "qwen3, not normalised": ({"model.experts": 16, "model.topk": 4, "model.router_pre_softmax": "on"},
                              lambda: qwen_block(False)),
    "deepseek-v3, 2 of 4 groups": (
        {"model.experts": 16, "model.topk": 4, "model.router_score": "sigmoid", "model.router_bias": "on",
         "model.router_groups": 4, "model.router_group_topk": 2, "model.router_scale": 2.5, "model.shared_ffn": FFN,
         "model.router_bias_rate": 0.02},
        lambda: deepseek_block(4, 2)),
    "deepseek-v3, not normalised": (
        {"model.experts": 16, "model.topk": 4, "model.router_score": "sigmoid", "model.router_bias": "on",
         "model.router_groups": 2, "model.router_group_topk": 2, "model.router_scale": 2.5, "model.shared_ffn": FFN,
         "model.router_norm": "off", "model.router_bias_rate": 0.02},
        lambda: deepseek_block(2, 2, False)),
}  # fmt: skip

# braid's keys and the names inside the blocks
NAMES = {
    "mlp.router.weight": "gate.weight",
    "mlp.router.expert_bias": "gate.e_score_correction_bias",
    "mlp.experts.linear_fc1.weight": "experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "experts.down_proj",
    "mlp.shared_experts.linear_fc2.weight": "shared_experts.down_proj.weight",
}


def norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def reference(block, params, tokens, labels):
    """Loss, and gradients by braid's key."""
    block = block.float()
    p = {k: v.float().clone().requires_grad_() for k, v in params.items()}
    own = dict(block.named_parameters()) | dict(block.named_buffers())
    with torch.no_grad():
        for key, name in NAMES.items():
            if LAYER + key in p:
                own[name].copy_(p[LAYER + key])
        if LAYER + "mlp.shared_experts.linear_fc1.weight" in p:
            gate, up = p[LAYER + "mlp.shared_experts.linear_fc1.weight"].chunk(2)
            own["shared_experts.gate_proj.weight"].copy_(gate)
            own["shared_experts.up_proj.weight"].copy_(up)
    embedding = p["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    x = x + block(norm(x, p[LAYER + "pre_mlp_layernorm.weight"]))
    logits = norm(x, p["decoder.final_norm.weight"]) @ embedding.T
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-1)
    loss.backward()
    grads = {k: v.grad for k, v in p.items() if v.grad is not None}
    for key, name in NAMES.items():
        if LAYER + key in p and own[name].grad is not None:
            grads[LAYER + key] = own[name].grad
    if "shared_experts.gate_proj.weight" in own:
        grads[LAYER + "mlp.shared_experts.linear_fc1.weight"] = torch.cat(
            [own["shared_experts.gate_proj.weight"].grad, own["shared_experts.up_proj.weight"].grad]
        )
    return loss.item(), grads


def braid(args, case, tmp):
    options = BASE | CASES[case][0] | {"run.device": args.device}
    words = [f"--{k}={v}" for k, v in options.items()]
    ckpt = []
    if args.trained:
        text, run = os.path.join(tmp, "text.txt"), os.path.join(tmp, "run")
        with open(text, "w", encoding="utf-8") as f:
            f.write("".join(chr(32 + (i * i * 31 + i // 7) % 29) for i in range(20000)))
        train = [f"--data.train={text}", f"--run.dir={run}", "--train.steps=20", "--train.lr=3e-3"]
        subprocess.run([args.braid, "train", *words, *train], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        steps = sorted(x for x in os.listdir(run) if x.startswith("step"))
        ckpt = [f"--ckpt={os.path.join(run, steps[-1]) if steps else run}"]
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), dtype=torch.int32)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), dtype=torch.int32)
    labels[0, :5] = -1
    save_file({"tokens": tokens, "labels": labels}, os.path.join(tmp, "in.safetensors"))
    io = [f"--in={tmp}/in.safetensors", f"--out={tmp}/out.safetensors"]
    subprocess.run([args.braid, "grads", *words, *ckpt, *io], check=True, stdout=subprocess.DEVNULL)
    return tokens.long(), labels.long(), load_file(os.path.join(tmp, "out.safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trained", action="store_true")
    args = parser.parse_args()
    failed = 0
    print(f"{'case':32} {'loss':>9} {'loss error':>11} {'worst gradient error':>21}")
    for case, (_, make) in CASES.items():
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as tmp:
            tokens, labels, out = braid(args, case, tmp)
        params = {k[6:]: v for k, v in out.items() if k.startswith("param.")}
        if args.trained and LAYER + "mlp.router.expert_bias" in params:
            assert params[LAYER + "mlp.router.expert_bias"].abs().max() > 0.01, "the expert bias did not move"
        loss, grads = reference(make(), params, tokens, labels)
        worst, where = 0.0, ""
        for key, want in grads.items():
            got = out["grad." + key].double()
            error = ((got - want.double()).abs().max() / want.abs().max()).item()
            if error > worst:
                worst, where = error, key
        missing = [k for k in out if k.startswith("grad.") and k[5:] not in grads]
        loss_error = abs(out["loss"].item() - loss)
        bad = loss_error > 2e-5 or worst > 1e-4 or missing
        failed += bool(bad)
        print(f"{case:32} {loss:9.5f} {loss_error:11.1e} {worst:21.1e}  {where}{' FAILED' if bad else ''} {missing or ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
