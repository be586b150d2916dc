#!/usr/bin/env python3
"""Writes tests/token/golden/chat.json: what apply_chat_template of transformers makes of a few conversations.

    python3 -m venv /tmp/judges && /tmp/judges/bin/pip install transformers jinja2
    /tmp/judges/bin/python tools/chat_judge.py > tests/token/golden/chat.json

For each named template: the text, and for three small tokenizers with the template's special tokens the ids and the mask of
the assistant's tokens. tests/token/test_chat.c compares. The Jinja texts below say what the published templates say for
messages without tools; {% generation %} marks what a model writes itself.
"""
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).resolve().parent.parent / "tests/token/golden"
TOKENIZERS = ["llama3style", "llama2style", "metaspace"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>",
           "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<bos>", "<start_of_turn>", "<end_of_turn>",
           "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
           "<｜Assistant｜>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]


def reply(text):
    return "{% generation %}" + text + "{% endgeneration %}"


def turns(before, between, after, ending, begin="", trim=False):
    """Every role is written alike: before ROLE between CONTENT after."""
    content = "m['content'] | trim" if trim else "m['content']"
    other = "{{ '%s' + m['role'] + '%s' + %s + '%s' }}" % (before, between, content, after + ending)
    own = "{{ '%sassistant%s' }}" % (before, between) + reply("{{ %s + '%s' }}" % (content, after)) + ("{{ '%s' }}" % ending if ending else "")
    return ("{{ '%s' }}" % begin + "{% for m in messages %}{% if m['role'] == 'assistant' %}" + own + "{% else %}" + other +
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '" + before + "assistant" + between + "' }}{% endif %}")


def first_system(begin, user, assistant, join, ask="", trim=False):
    """The system message is part of the user's first one. join writes both; a function of the two texts."""
    content = "m['content'] | trim" if trim else "m['content']"
    return ("{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content']" + (" | trim" if trim else "") +
            " %}{% set rest = messages[1:] %}{% else %}{% set s = none %}{% set rest = messages %}{% endif %}{{ '" + begin +
            "' }}{% for m in rest %}{% set c = " + content + " %}{% if m['role'] == 'user' %}{% if loop.first and s is not none %}" +
            "{% set c = " + join + " %}{% endif %}" + user + "{% else %}" + assistant +
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '" + ask + "' }}{% endif %}")


CHATML = turns("<|im_start|>", "\\n", "<|im_end|>", "\\n")
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
JINJA = {
    "chatml": CHATML,
    "qwen2.5": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + QWEN + "<|im_end|>\\n' }}{% endif %}" + CHATML,
    "llama2": first_system("", "{{ '<s>[INST] ' + c + ' [/INST]' }}", reply("{{ ' ' + c + ' </s>' }}"),
                           "'<<SYS>>\\n' + s + '\\n<</SYS>>\\n\\n' + c", trim=True),
    "llama3": turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>", "", "<|begin_of_text|>", True),
    "mistral": first_system("<s>", "{{ ' [INST] ' + c + ' [/INST]' }}", reply("{{ ' ' + c + '</s>' }}"), "s + '\\n\\n' + c"),
    "mistral-tekken": "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + m['content'] + "
                      "'[/SYSTEM_PROMPT]' }}{% elif m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}" +
                      reply("{{ m['content'] + '</s>' }}") + "{% endif %}{% endfor %}",
    "gemma": first_system("<bos>", "{{ '<start_of_turn>user\\n' + c + '<end_of_turn>\\n' }}",
                          "{{ '<start_of_turn>model\\n' }}" + reply("{{ c + '<end_of_turn>' }}") + "{{ '\\n' }}", "s + '\\n\\n' + c",
                          "<start_of_turn>model\\n", True),
    "zephyr": turns("<|", "|>\\n", "</s>", "\\n"),
    "deepseek": "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
                "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}{{ '<｜Assistant｜>' }}" +
                reply("{{ m['content'] + '<｜end▁of▁sentence｜>' }}") +
                "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    "phi3": turns("<|", "|>\\n", "<|end|>", "\\n"),
    "granite": turns("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "\\n"),
}
M = lambda *pairs: [{"role": r, "content": c} for r, c in pairs]
CONVERSATIONS = [
    M(("user", "Hello"), ("assistant", "Hi there")),
    M(("system", "You are a helpful assistant"), ("user", "Hello"), ("assistant", "Hi there"), ("user", "Who are you"),
      ("assistant", "   I am an assistant   "), ("user", "Another question"), ("assistant", "Sure.\n\nWhat is it?")),
    M(("user", "Größe? 日本語 🙂\n1. one\n2. two "), ("assistant", "Ja: e\u0301tude, 1234567.\n"), ("user", " don't"), ("assistant", "I'LL")),
    M(("system", "int main(void)\n{\n\treturn 0;\n}\n"), ("user", "what is this?"), ("assistant", "A program in C; it returns 0.")),
]


def tokenizer(name):
    """As tests/token/test_chat.c builds it: the small tokenizer, and the special tokens it lacks behind its last id."""
    d = json.loads((GOLDEN / (name + ".json")).read_text())
    have = {a["content"] for a in d["added_tokens"]}
    last = max([a["id"] for a in d["added_tokens"]] + list(d["model"]["vocab"].values()))
    for s in SPECIAL:
        if s not in have:
            last += 1
            d["added_tokens"].append({"id": last, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                                      "special": True})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(d)))


def main():
    toks = {name: tokenizer(name) for name in TOKENIZERS}
    cases = []
    for name, jinja in JINJA.items():
        for c in CONVERSATIONS:
            case = {"template": name, "messages": c, "tokens": {}}
            for t, tok in toks.items():
                tok.chat_template = jinja
                case["text"] = tok.apply_chat_template(c, tokenize=False)
                case["asks"] = tok.apply_chat_template(c[:-1], tokenize=False, add_generation_prompt=True)
                out = tok.apply_chat_template(c, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
                case["tokens"][t] = {"ids": list(out["input_ids"]), "mask": "".join(str(m) for m in out["assistant_masks"])}
            cases.append(case)
    json.dump({"made_by": "tools/chat_judge.py with transformers %s, tokenizers %s" % (transformers.__version__, tokenizers.__version__),
               "special": SPECIAL, "cases": cases}, sys.stdout, ensure_ascii=False, separators=(",", ":"))
    print()


main()
