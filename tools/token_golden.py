#!/usr/bin/env python3
"""Makes tests/token/golden: small tokenizers of every format, and the ids that tokenizers and tiktoken give with them.

    python3 -m venv /tmp/judges && /tmp/judges/bin/pip install tokenizers tiktoken
    /tmp/judges/bin/python tools/token_golden.py tests/token/golden

The files are committed; tests need no Python. Each TEXTS line of a .ids file is: base64 of the text, then the ids. Texts use
characters of Unicode 12 only, which all libraries agree on.
"""
import base64
import json
import random
import sys
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dogs weren't amused; they'd seen 12345 foxes, and I'll say 67 more!\n"
    "int main(void)\n{\n    return printf(\"hello, world\\n\") < 0; /* done */\n}\n\n\n"
    "Größe über alles: naïve café, Übermut tut selten gut. Straße, Straßen, Straßenbahn.\r\n"
    "Привет, мир! Как дела? 日本語のテキストです。中文文本也在这里。한국어 텍스트. नमस्ते दुनिया. ไทยภาษา\n"
    "    indented   text\twith tabs \n \n  and trailing spaces   \n====  ====\n--------\n    \n"
    "the theme of the thesis is there, these others bother the brothers; other mothers gather together.\n"
) * 12

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]


def texts():
    out = ["", "a", " ", "\n", "   ", "hello world", " hello  world ", "<|endoftext|>", "x<|endoftext|>y <|pad|> z", "e\u0301 \u00e9 \ufb01 \u00b2"]
    out += CORPUS.split("\n")[:8] + [CORPUS[:700]]
    out += ["I'LL don't WE'VE 'S 't\u017f '\u017f x'\u017fy", "\u3000\u2028\u00a0 x\u00a0y", "\u2581 \u2581\u2581x \u2581", "a" * 70, " " * 40, "ab" * 50]
    r = random.Random(7)
    alphabet = "abcXYZ'sStTdDlLvVeErRmM0123456789 \t\r\n/._-=<|>\u017f\u2028\u3000\u0301\u4e00\u3042\u00df\u0434\ud55c\u0e17\u093f\U0001f600\u200d"
    for _ in range(60):
        out.append("".join(r.choice(alphabet) for _ in range(r.randint(1, 60))))
    return out


def trained(pre, special=(), vocab=700):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(special),
                                  show_progress=False)
    tok.train_from_iterator([CORPUS], trainer)
    return tok


def byte_level(regexes):
    splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in regexes]
    return pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_ids(path, encode):
    lines = []
    for t in texts():
        lines.append(base64.b64encode(t.encode()).decode() + " " + " ".join(map(str, encode(t))))
    path.write_text("\n".join(lines) + "\n")


def hf_ids(path, tok):
    write_ids(path, lambda t: tok.encode(t, add_special_tokens=False).ids)


def save(tok, path):
    tok.save(str(path), pretty=False)
    hf_ids(path.with_suffix(".ids"), Tokenizer.from_file(str(path)))


def make_hf(out):
    tok = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    tok.add_tokens([AddedToken("<|pad|>", lstrip=True, rstrip=True), AddedToken("fox", single_word=True)])
    save(tok, out / "gpt2style.json")
    tok = trained(byte_level([LLAMA3]))
    tok.normalizer = normalizers.NFC()
    tok.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    tok.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tok.token_to_id("<|endoftext|>"))])
    d = json.loads(tok.to_str())
    d["model"]["ignore_merges"] = True
    (out / "llama3style.json").write_text(json.dumps(d, ensure_ascii=False))
    hf_ids(out / "llama3style.ids", Tokenizer.from_file(str(out / "llama3style.json")))
    tok = trained(byte_level(DEEPSEEK), ["<|endoftext|>"])
    tok.normalizer = normalizers.Sequence([])
    d = json.loads(tok.to_str())
    d["model"]["merges"] = [" ".join(m) if not isinstance(m, str) else m for m in d["model"]["merges"]]  # the older spelling
    (out / "deepseekstyle.json").write_text(json.dumps(d, ensure_ascii=False))
    hf_ids(out / "deepseekstyle.ids", Tokenizer.from_file(str(out / "deepseekstyle.json")))
    tok = trained(byte_level([r"\w+|[^\w\s]+|\s+"]))  # no known pattern: PCRE2
    tok.normalizer = normalizers.NFKC()
    save(tok, out / "regex.json")


def make_sentencepiece(out):
    """As Llama 2 and Mistral: U+2581 for spaces, bytes where a character has no token."""
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    tok.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tok.train_from_iterator([CORPUS[:700]], trainer)
    tok.pre_tokenizer = None
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    d = json.loads(tok.to_str())
    d["added_tokens"] = [a for a in d["added_tokens"] if a["id"] < 3]
    (out / "llama2style.json").write_text(json.dumps(d, ensure_ascii=False))
    hf_ids(out / "llama2style.ids", Tokenizer.from_file(str(out / "llama2style.json")))
    tok = Tokenizer.from_str(json.dumps(d))
    tok.normalizer = None
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    save(tok, out / "metaspace.json")


def make_ranks(out):
    tok = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    chars = {c: b for b, c in bytes_to_unicode().items()}
    ranks = {bytes(chars[c] for c in t): i for t, i in tok.get_vocab().items()}
    lines = [base64.b64encode(t).decode() + " " + str(i) for t, i in sorted(ranks.items(), key=lambda x: x[1])]
    (out / "small.tiktoken").write_text("\n".join(lines) + "\n")
    enc = tiktoken.Encoding("small", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks), "<|pad|>": len(ranks) + 1})
    write_ids(out / "small.ids", lambda t: enc.encode(t, allowed_special="all"))
    enc = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=ranks, special_tokens={})
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")} for t, i in
             sorted(ranks.items(), key=lambda x: x[1])]
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(ranks), "default_vocab_size": len(ranks) + 20 - 10, "default_num_special_tokens": 20,
              "version": "v3"}
    (out / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    short = {t: i for t, i in ranks.items() if i < len(ranks) - 10}
    enc = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=short, special_tokens={})
    write_ids(out / "tekken.ids", lambda t: [i + 20 for i in enc.encode_ordinary(t)])


def make_gpt2(out):
    tok = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocab = tok.get_vocab()
    vocab["<|endoftext|>"] = len(vocab)
    merges = [" ".join(m) if not isinstance(m, str) else m for m in json.loads(tok.to_str())["model"]["merges"]]
    (out / "gpt2").mkdir(exist_ok=True)
    (out / "gpt2" / "encoder.json").write_text(json.dumps(vocab))
    (out / "gpt2" / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tok = Tokenizer(models.BPE.from_file(str(out / "gpt2" / "encoder.json"), str(out / "gpt2" / "vocab.bpe")))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_special_tokens(["<|endoftext|>"])
    hf_ids(out / "gpt2" / "encoder.ids", tok)


def make_training(out):
    """What the trainer must find: the corpus, and the merges of Hugging Face's trainer."""
    (out / "corpus.txt").write_bytes(CORPUS.encode())
    for name, pre in (("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False)), ("llama3", byte_level([LLAMA3]))):
        merges = json.loads(trained(pre, vocab=900).to_str())["model"]["merges"]
        pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
        (out / ("merges-%s.txt" % name)).write_text("\n".join(a + " " + b for a, b in pairs) + "\n")


def bytes_to_unicode():
    plain = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    out, n = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in out:
            out[b] = chr(256 + n)
            n += 1
    return out


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/token/golden")
    out.mkdir(parents=True, exist_ok=True)
    make_hf(out)
    make_sentencepiece(out)
    make_ranks(out)
    make_gpt2(out)
    make_training(out)
    (out / "MADE_BY").write_text("tools/token_golden.py with tokenizers %s, tiktoken %s\n" % (tokenizers.__version__, tiktoken.__version__))


main()
