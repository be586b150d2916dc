/* braid serve: a trained model behind HTTP, for clients of OpenAI's completions interface and for a browser. */
#include "cmd/cmd.h"
#include "serve/serve.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] = "usage: braid serve RUN_OR_CHECKPOINT [--port=8000] [--host=127.0.0.1] [--token=FILE] "
                            "[--length=N] [--section.key=value ...]\n\n"
                            "Answers POST /v1/completions (prompt, max_tokens, temperature, top_p, top_k, stop, seed, "
                            "echo, logprobs), POST /v1/chat/completions\n"
                            "(messages, by the template of data.chat), GET /v1/models and GET /health; a browser finds "
                            "a page at /. docs/SERVE.md describes the fields, and how "
                            "lm-evaluation-harness uses it.\n"
                            "--host        an address beyond this machine needs --token\n"
                            "--port        0 takes a free one, which the first line of the output names\n"
                            "--token       a file whose first line clients must send as 'Authorization: Bearer ...'\n"
                            "--length      the longest prompt with what follows it, in tokens; train.seq by default\n"
                            "--max-tokens, --max-body, --max-seconds, --max-connections\n"
                            "              limits of a request: tokens of all its prompts and answers (131072), bytes "
                            "(16mi), time (300), and how many\n"
                            "              connections are open at once (64)\n"
                            "SIGINT, SIGTERM and SIGHUP stop it.\n";

#ifdef BRAID_HTTP

enum { PORT, HOST, TOKEN, LENGTH, MAX_TOKENS, MAX_BODY, MAX_SECONDS, MAX_CONNECTIONS, N_WORDS };

struct job {
    struct config c;
    struct ckpt *from;
    struct scorer s;
    struct serve_opts o;
    char *token, *model;
};

static int number(const struct config_extra *x, int64_t least, int64_t most, int64_t *out, struct err *e)
{
    if (x->value == NULL || (parse_i64(x->value, out) && *out >= least && *out <= most))
        return ST_OK;
    return err_set(e, ST_USAGE, "--%s=%s is no number from %lld to %lld", x->name, x->value, (long long)least,
                   (long long)most);
}

static int read_words(struct job *j, const struct config_extra *x, struct err *e)
{
    struct serve_address unused;
    int64_t port = 8000, seconds = 300, connections = 64;
    j->o = (struct serve_opts){.host = x[HOST].value != NULL ? x[HOST].value : "127.0.0.1",
                               .limits = {.body_bytes = 16 << 20, .tokens = 131072},
                               .quiet = j->c.run.quiet};
    TRY(number(&x[PORT], 0, 65535, &port, e));
    TRY(number(&x[MAX_TOKENS], 2, 1 << 30, &j->o.limits.tokens, e));
    TRY(number(&x[MAX_BODY], 64, 1 << 30, &j->o.limits.body_bytes, e));
    TRY(number(&x[MAX_SECONDS], 1, 86400, &seconds, e));
    TRY(number(&x[MAX_CONNECTIONS], 1, 1000, &connections, e));
    if (x[TOKEN].value != NULL)
        TRY(serve_read_token(x[TOKEN].value, &j->token, e));
    j->o.port = (int)port;
    j->o.limits.seconds = (double)seconds;
    j->o.limits.connections = (int)connections;
    j->o.token = j->token;
    /* Before the model is loaded, which may take a while; serve_run asks again. */
    return serve_address(&unused, j->o.host, j->o.port, j->token != NULL, e);
}

/* The last part of the path that was given. */
static int name_model(struct job *j, const char *path, struct err *e)
{
    size_t n = strlen(path), from;
    while (n > 1 && path[n - 1] == '/')
        n--;
    for (from = n; from > 0 && path[from - 1] != '/';)
        from--;
    j->model = strndup(path + from, n - from);
    j->o.model = j->model;
    return j->model != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory");
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    struct config_extra x[N_WORDS] = {[PORT] = {.name = "port"},
                                      [HOST] = {.name = "host"},
                                      [TOKEN] = {.name = "token"},
                                      [LENGTH] = {.name = "length"},
                                      [MAX_TOKENS] = {.name = "max-tokens"},
                                      [MAX_BODY] = {.name = "max-body"},
                                      [MAX_SECONDS] = {.name = "max-seconds"},
                                      [MAX_CONNECTIONS] = {.name = "max-connections"}};
    struct config_args args = {.extra = x, .n_extra = N_WORDS};
    TRY(cmd_config(&j->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 1, e));
    TRY(read_words(j, x, e));
    TRY(cmd_open_checkpoint(&j->c, &args, &j->from, e));
    TRY(cmd_finish(&j->c, e));
    TRY(cmd_refuse_weights(&j->c, "braid serve", e));
    cmd_say_unread(&j->c, "serve");
    TRY(cmd_length(&j->c, x[LENGTH].value, &j->o.limits.length, e));
    TRY(name_model(j, args.n_positional > 0 ? args.positional[0] : ckpt_path(j->from), e));
    TRY(serve_block_signals(e));
    TRY(scorer_open(&j->s, &j->c, j->from, j->o.limits.length, e));
    return serve_run(&j->s, &j->o, e);
}

static int serve(int argc, char **argv)
{
    struct job j = {.model = NULL};
    struct err e = {0};
    int code = cmd_exit(run(&j, argc, argv, &e), &e);
    scorer_close(&j.s);
    ckpt_close(j.from);
    config_release(&j.c);
    free(j.token);
    free(j.model);
    return code;
}

#else

static int serve(int argc, char **argv)
{
    struct err e = {0};
    (void)argc;
    (void)argv;
    err_set(&e, ST_UNSUPPORTED, "`braid serve` is not built in: libmicrohttpd was missing when this program was made");
    err_hint(
        &e,
        "tools/install-deps installs it; then build again. `braid eval --tasks` and `braid generate` need no server");
    return cmd_exit(e.code, &e);
}

#endif

int cmd_serve(int argc, char **argv)
{
    return cmd_wants_help(argc, argv, usage, "data.tokenizer data.chat run.device run.threads run.quiet")
               ? 0
               : serve(argc, argv);
}
