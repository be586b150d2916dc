#!/usr/bin/env bash
# Conversations from the command line: a model learns them, answers by their template in the terminal and over HTTP; bad lines and
# other templates are refused by name.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$dir"' EXIT
refuses() { fails 1 "$@"; }

for _ in $(seq 30); do
    for c in red blue; do
        printf '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n' $c ${c^^}
        printf '{"conversations": [{"from": "human", "value": "%s"}, {"from": "gpt", "value": "%s"}, {"from": "human", "value": "go"}, {"from": "gpt", "value": "on"}]}\n' $c ${c^^}
    done
done >c.jsonl
printf '%s\n' '# one letter for each role' 'begin = "^"' 'system = "S{content}\n"' 'user = "U{content}\n"' 'assistant = "A{content}\n"' 'stop = "\n"' >own.template

# ---- token files ---------------------------------------------------------------------------------------------------------------
ok "conversations become a token file" prints 'learned: assistant, .*marked in t.loss' "$BRAID" data tokenize --in c.jsonl --out t --data.chat=own.template
ok "with a mark for each token" test "$(stat -c %s t.loss)" -eq "$(stat -c %s t.bin)"
ok "info names the template" prints 'template own.template; learned: assistant' "$BRAID" data info t
ok "an unknown template" refuses 'known are auto, chatml' "$BRAID" data tokenize --in c.jsonl --out x --data.chat=chatnl
ok "an unknown role" refuses "'asistant' is no role" "$BRAID" data tokenize --in c.jsonl --out x --data.chat=chatml --data.loss_roles=asistant
{ head -2 c.jsonl; echo '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}'; } >bad.jsonl
ok "a bad line is named" refuses 'bad.jsonl, line 3: message 2: content is no text' "$BRAID" data tokenize --in bad.jsonl --out x --data.chat=chatml
ok "or counted" prints '1 bad lines, the first: bad.jsonl, line 3' "$BRAID" data tokenize --in bad.jsonl --out x --data.chat=chatml --skip-bad

# ---- training -------------------------------------------------------------------------------------------------------------------
learn() { "$BRAID" train "$tiny" --run.threads=1 --data.train="$1" --data.chat="$2" "${@:3}"; }
ok "a model learns them" runs learn t own.template --run.dir=run --train.steps=150 --train.lr=2e-2 --train.warmup=5 --train.seq=32
ok "without the template it is refused" fails 1 'set data.chat=own.template' "$BRAID" train "$tiny" --data.train=t --train.steps=3
ok "with another one too" fails 1 'made with chat template own.template' learn t chatml --train.steps=3
ok "and with other roles" fails 1 'made for data.loss_roles=assistant' learn t own.template --data.loss_roles=all --train.steps=3
ok "text is no conversation" fails 1 'holds no conversations' learn "$root/tests/token/golden/corpus.txt" own.template --train.steps=3

# ---- the terminal; the checkpoint carries the template ------------------------------------------------------------------------------
rm own.template
talk() { printf "$1" | "$BRAID" generate run --chat=on --generate.temperature=0 --generate.tokens=9 --run.threads=1 "${@:2}"; }
ok "it answers, remembers and begins again" test "$(talk 'red\ngo\n/new\nblue\n' 2>/dev/null | tr '\n' ' ')" = "RED on BLUE "
ok "one prompt, one reply" test "$(talk '' --generate.prompt=blue 2>/dev/null)" = BLUE
ok "a conversation that is too long" says 'another one begins' talk 'red\nred\nred\nred\nred\nred\nred\nred\n' --length=24
ok "a message that is too long" fails 2 'the message has' talk 'a message of more than sixteen letters\n' --length=16
ok "--system needs --chat" fails 2 'belong to --chat=on' "$BRAID" generate run --system=x
"$BRAID" train "$tiny" --run.threads=1 --run.dir=plain --train.steps=3 --data.train="$root/tests/token/golden/corpus.txt" --run.quiet=on >/dev/null 2>&1
ok "a model without a template says so" fails 1 'data.chat is not set' "$BRAID" generate plain --chat=on

# ---- HTTP ---------------------------------------------------------------------------------------------------------------------------
if command -v curl >/dev/null; then
    "$BRAID" serve run --port=0 --run.threads=1 >served 2>served.err &
    server=$!
    for _ in $(seq 600); do grep -q http served && break; kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
fi
if grep -q 'http' served 2>/dev/null; then
    url=$(grep -o 'http://[^ ]*' served)
    chat() { curl -s -m 20 "$url/v1/chat/completions" -d "$1"; }
    ok "a reply over HTTP" grep -qF '"message": {"role": "assistant", "content": "RED"}' <(chat '{"messages": [{"role": "user", "content": "red"}], "temperature": 0}')
    ok "that stops" grep -qF '"finish_reason": "stop"' <(chat '{"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "RED"}, {"role": "user", "content": "go"}], "temperature": 0}')
    ok "a role that is none" grep -qF "role 'king'" <(chat '{"messages": [{"role": "king", "content": "red"}]}')
    ok "nobody to reply to" grep -qF 'no message to reply to' <(chat '{"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "RED"}]}')
    kill -TERM "$server"
    wait "$server"
else
    echo "skip: the server is not built in, or there is no curl"
fi
server=
finish
