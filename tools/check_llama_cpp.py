#!/usr/bin/env python3
"""GGUF files against llama.cpp: small models that braid trained, of each architecture, continue a prompt greedily in both.

    python3 tools/check_llama_cpp.py [BRAID]          default: build/braid

Trains a tokenizer of its own, a llama, a qwen3 and a qwen3_moe model for a few steps, exports each as F32 and loads it with the
llama.cpp of the package xllamacpp. Nothing is downloaded. Exit code 1 if a text differs."""
import glob
import pathlib
import subprocess
import sys
import tempfile

import xllamacpp

ROOT = pathlib.Path(__file__).resolve().parent.parent
BRAID = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/braid").resolve())
PROMPT, TOKENS = "static int ", 24
COMMON = ["--model.hidden=64", "--model.heads=4", "--model.kv_heads=2", "--model.ffn=128", "--model.act=swiglu", "--train.seq=128", "--train.micro_batch=8", "--train.global_batch=8",
          "--train.steps=200", "--train.lr=2e-3", "--train.warmup=10", "--run.quiet=on", "--run.tensorboard=off", "--run.report=off"]  # fmt: skip
QWEN3 = ["--model.qk_norm=on", "--model.head_dim=32"]
MODELS = {
    "llama": ["--model.pattern=*-*-"],
    "llama, groups": ["--model.pattern=[*-]x2", "--model.tied=off"],
    "qwen3": ["--model.pattern=[*-]x2", *QWEN3],
    "qwen3_moe": ["--model.pattern=[*E]x2", "--model.experts=8", "--model.topk=2", "--model.expert_ffn=48", "--model.tied=off", *QWEN3],
}


def run(*words):
    done = subprocess.run([BRAID, *map(str, words)], capture_output=True)
    if done.returncode != 0:
        sys.exit(f"braid {' '.join(map(str, words))}: {done.stderr.decode(errors='replace')}")
    return done.stdout.decode(errors="replace")


def continue_in_llama_cpp(path):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 128, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.sampling.temp = 0.0
    answer = xllamacpp.Server(params).handle_completions({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0})
    return answer["choices"][0]["text"]


def main():
    failed = 0
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as folder:
        here = pathlib.Path(folder)
        (here / "text.txt").write_text("".join(pathlib.Path(p).read_text() for p in sorted(glob.glob(f"{ROOT}/src/base/*.c"))))
        run("data", "train-tokenizer", "--in", here / "text.txt", "--out", here / "bpe", "--vocab=600", "--pattern=gpt2")
        tokenizer = next(iter(glob.glob(f"{here}/bpe*/tokenizer.json") + glob.glob(f"{here}/bpe*.json")))
        for i, (name, options) in enumerate(MODELS.items()):
            at = here / f"run{i}"
            run("train", ROOT / "configs/tiny.ini", f"--data.train={here}/text.txt", f"--data.tokenizer={tokenizer}", f"--run.dir={at}", *COMMON, *options)
            run("export", at, here / f"{i}.gguf", "--format=gguf", "--dtype=f32")
            ours = run("generate", at, f"--generate.prompt={PROMPT}", f"--generate.tokens={TOKENS}", "--generate.temperature=0")
            theirs = continue_in_llama_cpp(here / f"{i}.gguf")
            same = ours.strip("\n").endswith((PROMPT + theirs).strip("\n")) or ours.strip("\n") == theirs.strip("\n")
            failed += not same
            print(f"{'ok' if same else 'not ok'} {name}: {theirs!r}" + ("" if same else f", braid: {ours!r}"), flush=True)
    sys.exit(failed > 0)


main()
