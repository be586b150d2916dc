#!/usr/bin/env python3
"""Scores a synthetic multiple-choice task with lm-evaluation-harness through `braid serve`, with token ids and with text as
prompts, and compares every log-likelihood and greedy flag with `braid eval --tasks`. Trains its own tokenizer and a tiny
model; nothing is downloaded. Exit code 1 if a value differs.

    python3 tools/check_harness.py [BRAID]          default: build/braid

Needs lm-eval[api] and transformers, whose tokenizer the harness uses."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRAID = str(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/braid").resolve())
LENGTH = 96

TASK = """task: braid_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""


def write_tasks(folder):
    """The same questions in the harness's form and in ours. Some contexts are too long, and must lose their beginning in both."""
    things = ["apples", "pears", "the lazy dog", "a brother's theme", "ünïcode wörds", "numbers like 3.14", "東京", "\N{OWL}"]
    rng = random.Random(3)
    with open(folder / "harness.jsonl", "w") as theirs, open(folder / "tasks.jsonl", "w") as ours:
        for i in range(24):
            context = f"Line {i}: the quick brown {rng.choice(things)} jumps over the" + " very lazy" * (i % 5 == 4) * 40
            if i % 6 == 5:
                context += "  \n"
            choices, label = rng.sample(things, 4), rng.randrange(4)
            theirs.write(json.dumps({"query": context, "choices": choices, "gold": label}) + "\n")
            ours.write(json.dumps({"context": context, "continuations": [" " + c for c in choices], "label": label}) + "\n")
    (folder / "choice.yaml").write_text(TASK.format(file=folder / "harness.jsonl"))


def prepare(folder):
    corpus = ROOT / "tests/token/golden/corpus.txt"
    quiet = {"check": True, "cwd": folder, "stdout": subprocess.DEVNULL}
    subprocess.run([BRAID, "data", "train-tokenizer", "--in", corpus, "--out", "tok", "--vocab=500"], **quiet)
    subprocess.run([BRAID, "train", ROOT / "configs/tiny.ini", f"--data.train={corpus}", "--data.tokenizer=tok.json",
                    "--data.eod=on", "--run.dir=run", "--train.steps=40", "--train.warmup=0", f"--train.seq={LENGTH}",
                    "--run.quiet=on"], **quiet)
    (folder / "hf").mkdir()
    (folder / "tok.json").rename(folder / "hf/tokenizer.json")
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}))
    write_tasks(folder)
    # The harness keeps one token of its max_length for the one that is generated.
    subprocess.run([BRAID, "eval", "run", "--tasks=tasks.jsonl", "--out=ours.jsonl", f"--length={LENGTH - 1}"], **quiet)


def harness(folder, url, tokenized):
    out = folder / f"out-{tokenized}"
    args = f"base_url={url}/v1/completions,model=run,tokenizer={folder}/hf,tokenized_requests={tokenized}," \
           f"num_concurrent=2,max_length={LENGTH}"
    env = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(folder / "cache"))
    run = subprocess.run([sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", args,
                          "--tasks", "braid_choice", "--include_path", folder, "--batch_size", "4", "--log_samples",
                          "--output_path", out], env=env, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stdout + run.stderr)
    samples = [json.loads(line) for line in next(out.rglob("samples_*.jsonl")).open()]
    return [s["filtered_resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]


def compare(folder, url, tokenized):
    worst, flags, n = 0.0, 0, 0
    ours = [json.loads(line) for line in (folder / "ours.jsonl").open()]
    theirs = harness(folder, url, tokenized)
    assert len(ours) == len(theirs) == 24
    for a, b in zip(ours, theirs):
        assert len(a["logprobs"]) == len(b)
        for logprob, greedy, (their_logprob, their_greedy) in zip(a["logprobs"], a["greedy"], b):
            worst = max(worst, abs(logprob - float(their_logprob)))
            flags += str(greedy) != str(their_greedy)
            n += 1
    print(f"tokenized_requests={tokenized}: {n} log-likelihoods, largest difference {worst:g}, greedy flags that differ: {flags}")
    return worst <= 1e-9 and flags == 0


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        server = subprocess.Popen([BRAID, "serve", "run", "--port=0", "--run.quiet=on"], cwd=folder, stdout=subprocess.PIPE,
                                  text=True)
        try:
            url = re.search(r"http://\S+", server.stdout.readline()).group()
            same = [compare(folder, url, tokenized) for tokenized in (True, False)]
        finally:
            server.send_signal(signal.SIGTERM)
            stopped = server.wait()
        sys.exit(0 if all(same) and stopped == 0 else 1)


if __name__ == "__main__":
    main()
