#!/usr/bin/env bash
# Multiple-choice tasks (`braid eval --tasks`) and the server (`braid serve`): both give the same log-likelihoods; bad lines and bad
# requests are named; limits, the token and signals. The client is curl; without it the server's part is left out.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1
server=
stop_server() { [ -z "$server" ] || kill "$server" 2>/dev/null; }
trap 'stop_server; rm -rf "$dir"' EXIT
train --run.dir=run --train.steps=6 --data.eod=on >/dev/null 2>&1
score() { "$BRAID" eval run --run.threads=1 --run.quiet=on "$@"; }

# ---- tasks ------------------------------------------------------------------------------------------------------------------
cat >tasks.jsonl <<'END'
{"context": "line 7: ", "continuations": ["apples", "and a plum", "é"], "label": 1, "id": "ignored"}

{"context": [108, 105], "continuations": [[110, 101], "ne"], "label": 0}
{"context": "", "continuations": ["line"], "label": null}
END
ok "tasks are scored" prints '^accuracy: ' score --tasks=tasks.jsonl --out=scores.jsonl
ok "lines, continuations and labels are counted" test "$(grep -E '^(lines|continuations|labelled): ' out | tr '\n' ' ')" = "lines: 3 continuations: 6 labelled: 2 "
ok "a line for each task, with its number" test "$(sed -nE 's/^\{"line": ([0-9]+),.*/\1/p' scores.jsonl | tr '\n' ' ')" = "1 3 4 "
field() { sed -n "$1p" scores.jsonl | sed -E "s/.*\"$2\": \[([^]]*)\].*/\1/; s/,//g"; } # line, name: the list's elements
ok "bytes are those of the text" test "$(field 1 bytes)" = "6 10 2"
# shellcheck disable=SC2046
same_twice() { set -- $(field 2 logprobs) && [ "$1" = "$2" ]; }
ok "ids and text of the same tokens score the same" same_twice
# The chain rule: scores of two tokens are those of one and one.
cat >chain.jsonl <<'END'
{"context": "line 7", "continuations": [": a", ":"]}
{"context": "line 7:", "continuations": [" a"]}
END
ok "tasks without labels need none" runs score --tasks=chain.jsonl --out=scores.jsonl
ok "and have no accuracy" test "$(grep -c accuracy out)" -eq 0
chain() { echo "$(field 1 logprobs) $(field 2 logprobs)" | awk '{ d = $1 - $2 - $3; exit !(d < 1e-4 && d > -1e-4 && $1 < $2 && $2 < 0) }'; }
ok "log-likelihoods add up over tokens" chain
bad() { # text, line...: a file whose second line is this
    printf '%s\n' '{"context": "a", "continuations": ["b"]}' "$2" >bad.jsonl
    fails 1 "bad.jsonl, line 2: $1" score --tasks=bad.jsonl --out=never.jsonl
}
ok "a line that is not JSON is named" bad 'this is not JSON' '{"context": "a", '
ok "a missing context" bad 'field "context" is missing' '{"continuations": ["b"]}'
ok "continuations that are none" bad 'field "continuations" is not a list' '{"context": "a", "continuations": []}'
ok "a label beyond the list" bad 'field "label" must be a number from 0 to 0' '{"context": "a", "continuations": ["b"], "label": 1}'
ok "an unknown token" bad 'continuations[0]: continuations: token 999 does not exist' '{"context": "a", "continuations": [[999]]}'
ok "an empty continuation" bad 'continuations[1] adds no token' '{"context": "a", "continuations": ["b", ""]}'
ok "a continuation that is too long" bad 'continuations[0] has 40 tokens; 31 fit' "{\"context\": \"a\", \"continuations\": [\"$(printf 'x%.0s' $(seq 40))\"]}"
ok "nothing is written then" test ! -e never.jsonl
: >empty.jsonl
ok "a file without tasks" fails 1 'holds no task' score --tasks=empty.jsonl
ok "a file that is not there" fails 1 'absent.jsonl' score --tasks=absent.jsonl
ok "options of validation data are refused" fails 2 '--data.valid has no effect on --tasks' score --tasks=tasks.jsonl --data.valid=x
ok "--out needs --tasks" fails 2 '--out and --length belong to --tasks' score --out=x
printf '{"context": "%s", "continuations": ["b"], "label": 0}\n' "$(printf 'x%.0s' $(seq 40))" >long.jsonl
ok "a long context is cut, and that is said" says '1 of 1 sequences were longer than 32 tokens' score --tasks=long.jsonl
ok "or planned for" prints '^tokens: 41' score --tasks=long.jsonl --length=64

# A tokenizer whose template begins a text with token 604.
train --run.dir=bos --train.steps=3 --data.tokenizer="$root/tests/token/golden/llama3style.json" --data.eod=on >/dev/null 2>&1
printf '%s\n' '{"context": "a", "continuations": [[5], [6]]}' '{"context": [604, 64], "continuations": [[5], [6]]}' \
    '{"context": "", "continuations": [[5]]}' '{"context": [604], "continuations": [[5]]}' '{"context": [64], "continuations": [[5], [6]]}' >bos.jsonl
ok "a tokenizer with a template" runs "$BRAID" eval bos --tasks=bos.jsonl --out=scores.jsonl --run.threads=1 --run.quiet=on
ok "text begins as its template says" test "$(field 1 logprobs)" = "$(field 2 logprobs)"
ok "so does an empty context" test "$(field 3 logprobs)" = "$(field 4 logprobs)"
ok "ids are taken as they are" test "$(field 1 logprobs)" != "$(field 5 logprobs)"

# ---- the server ---------------------------------------------------------------------------------------------------------------
if "$BRAID" serve nowhere 2>&1 | grep -q 'is not built in'; then
    ok "serve says that it is not built in" fails 1 'libmicrohttpd was missing' "$BRAID" serve run
    finish
fi
ok "beyond this machine a token is needed" fails 2 '--token=FILE' "$BRAID" serve run --host=0.0.0.0
ok "a port that is none" fails 2 '--port=70000 is no number' "$BRAID" serve run --port=70000
echo short >token
ok "a token that is too short" fails 2 'at least 16 printable characters' "$BRAID" serve run --token=token
if ! command -v curl >/dev/null; then
    echo "ok the server itself is not tested: there is no curl"
    finish
fi
serve() { serve_run run "$@"; } # options...
serve_run() { # run folder, options...: sets $server and $url
    : >server.out
    set -m
    "$BRAID" serve "$1" --port=0 --run.threads=1 "${@:2}" >server.out 2>server.err &
    server=$!
    set +m
    wait_for_text '^serving' server.out "$server" || { sed 's/^/  /' server.err; return 1; }
    url=$(sed -nE 's/.*(http:[^ ]*).*/\1/p' server.out)
}
ask() { curl -s -m 100 -H 'Content-Type: application/json' "$@"; }           # curl's words
complete() { ask "$url/v1/completions" -d "$1" "${@:2}" >answer; }       # JSON
answers() { complete "$2" "${@:3}" && grep -qF -- "$1" answer || { sed 's/^/  /' answer; return 1; } } # text, JSON
status() { curl -s -m 100 -o answer -w '%{http_code}' "$@"; }
list() { sed -E "s/.*\"$1\": \[([^]]*)\].*/\1/; s/,//g" answer; }

ok "the server starts" serve
ok "health" test "$(ask "$url/health")" = '{"status": "ok", "waiting": 0}'
ok "models" test "$(ask "$url/v1/models" | grep -c '"id": "run".*"max_model_len": 32')" -eq 1
ok "a page" test "$(curl -s "$url/" | grep -c '<title>braid</title>')" -eq 1
ok "a text is continued" answers '"finish_reason": "length"' '{"prompt": "line 7: ", "max_tokens": 5, "seed": 3}'
text() { sed -E 's/.*"text": ("[^"]*").*/\1/' answer; }
first=$(text)
ok "the same seed gives the same text" answers "$first" '{"prompt": "line 7: ", "max_tokens": 5, "seed": 3}'
ok "tokens are counted" grep -qF '"usage": {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}' answer
ok "ids" answers "$first" '{"prompt": [108, 105, 110, 101, 32, 55, 58, 32], "max_tokens": 5, "seed": 3}'
ok "several prompts" answers '"index": 1' '{"prompt": ["a", "b"], "max_tokens": 2, "temperature": 0}'
ok "several lists of ids" answers '"index": 1' '{"prompt": [[97], [98]], "max_tokens": 2, "temperature": 0}'
complete '{"prompt": "line 7: ", "max_tokens": 8, "temperature": 0}'
whole=$(text)
ok "a stop text ends it" answers '"text": "", "logprobs": null, "finish_reason": "stop"' "{\"prompt\": \"line 7: \", \"max_tokens\": 8, \"temperature\": 0, \"stop\": [\"zz\", \"${whole:1:1}\"]}"
ok "an unknown field is named" answers 'did you mean \"max_tokens\"?' '{"prompt": "a", "max_token": 5}'
ok "a prompt that is too long" answers 'together at most 32' '{"prompt": "a", "max_tokens": 32}'
ok "an answer in pieces is refused" answers '"stream\" is not supported' '{"prompt": "a", "stream": true}'
ok "nonsense is refused" test "$(status "$url/v1/completions" -d 'nonsense')" = 400
ok "GET is refused" test "$(status "$url/v1/completions")" = 405
ok "other paths" test "$(status "$url/etc/passwd")" = 404
ok "another site's page" test "$(status -H 'Origin: http://evil.example' "$url/v1/models")" = 403
ok "another name of this machine" test "$(status -H 'Host: evil.example' "$url/v1/models")" = 403

# Log-probabilities of the server are those of --tasks, to the last digit.
printf '{"context": "line 7: ", "continuations": ["apples"]}\n' >one.jsonl
score --tasks=one.jsonl --out=scores.jsonl >/dev/null 2>&1
complete '{"prompt": "line 7: apples", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1}'
# The harness's rule: a trailing space of the context belongs to the continuation, and the last token is the generated one.
sum=$(list token_logprobs | awk '{ s = 0; for (i = 8; i < NF; i++) s += $i; printf "%.15g", s }')
ok "eval and serve agree" test "$sum" = "$(field 1 logprobs | awk '{ printf "%.15g", $1 }')"
ok "the first token has no probability" test "$(list token_logprobs | cut -d' ' -f1)" = null
ok "offsets of an echoed prompt" test "$(list text_offset | cut -d' ' -f1-5)" = "0 1 2 3 4"
ok "the likeliest token is among the alternatives" answers '"top_logprobs": [{' '{"prompt": "a", "max_tokens": 1, "temperature": 0, "logprobs": 0}'

# Many at once, and clients that go away.
for i in $(seq 12); do ask "$url/v1/completions" -d '{"prompt": "line", "max_tokens": 20, "temperature": 0}' >"many.$i" & many[i]=$!; done
wait "${many[@]}"
ok "many at once" test "$(cat many.* | grep -c '"finish_reason"')" -eq 12
ok "all the same" test "$(sed -E 's/.*"text": ("[^"]*").*/\1/' many.* | sort -u | wc -l)" -eq 1
kill -TERM "$server"
wait "$server"
ok "SIGTERM ends it with 0" test $? -eq 0

ok "the server of that model" serve_run bos
ok "a text begins as the template says" answers '"tokens": ["<|endoftext|>", "a"]' '{"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1}'
ok "of which the text shows nothing" grep -qF '"text": "a"' answer
ok "unless the request says otherwise" answers '"tokens": ["a"]' '{"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1, "add_special_tokens": false}'
kill -TERM "$server"
wait "$server"

# ---- limits -----------------------------------------------------------------------------------------------------------------------
echo 0123456789abcdefgh >token
long="{\"temperature\": 0, \"max_tokens\": 3900, \"prompt\": [\"a\"$(printf ', "a"%.0s' $(seq 200))]}"
ok "with a token and limits" serve --token=token --max-body=3000 --length=4000 --max-tokens=1000000 --max-seconds=3 --host=127.0.0.1
bearer=(-H 'Authorization: Bearer 0123456789abcdefgh')
ok "without the token" test "$(status "$url/v1/models")" = 401
ok "with a wrong one" test "$(status -H 'Authorization: Bearer 0123456789abcdefgx' "$url/v1/models")" = 401
ok "with it" test "$(status "${bearer[@]}" "$url/v1/models")" = 200
head -c 4000 /dev/zero >zeros
ok "a body that is too large" test "$(status "${bearer[@]}" --data-binary @zeros "$url/v1/completions")" = 413
ok "also in chunks of unknown length" test "$(status "${bearer[@]}" -H 'Transfer-Encoding: chunked' --data-binary @zeros "$url/v1/completions")" = 000
ok "a request that takes too long" answers 'took longer than the 3 seconds' "$long" "${bearer[@]}"
ok "the next one is answered" answers '"finish_reason"' '{"prompt": "a", "max_tokens": 1}' "${bearer[@]}"
kill -INT "$server"
wait "$server"
ok "SIGINT ends it with 0" test $? -eq 0
ok "a request under way" serve --length=4000 --max-tokens=1000000
ask "$url/v1/completions" -d "$long" >slow &
slow=$!
ask "$url/v1/completions" -d "$long" >waiting &
waiting=$!
both_arrived() { curl -s -m 10 "$url/health" | grep -q '"waiting": 2'; }
wait_while_running "$server" both_arrived
kill -TERM "$server"
wait "$server"
ok "does not hold up the end" test $? -eq 0
wait "$slow" "$waiting"
ok "and is told so, as are those that wait" test "$(cat slow waiting | grep -c 'the server is stopping')" -eq 2
server=
finish
