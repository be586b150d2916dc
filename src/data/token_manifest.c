/* The manifest beside a token file, PREFIX.tokens.json: how its tokens were made. A pair without
 * one is as good, only nothing is known about its tokenizer. */
#include "data/data_int.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MANIFEST_MAX = 1 << 20 };
static const char format_name[] = "braid tokens 1";

static char *manifest_path(const char *prefix, struct err *e)
{
    char *path = NULL;
    size_t n = strlen(prefix) + 16;
    if (mem_array((void **)&path, n, 1, e) != ST_OK)
        return NULL;
    snprintf(path, n, "%s.tokens.json", prefix);
    return path;
}

int token_manifest_remove(const char *prefix, struct err *e)
{
    char *path = manifest_path(prefix, e);
    if (path == NULL)
        return ST_NOMEM;
    int st = unlink(path) == 0 || errno == ENOENT ? ST_OK : err_errno(e, "cannot remove %s", path);
    free(path);
    return st;
}

int token_manifest_write(const struct tokenize_opts *o, const struct tokenize_stats *s, struct err *e)
{
    char hash[17], *path = manifest_path(o->out, e), *text = NULL;
    if (path == NULL)
        return ST_NOMEM;
    const struct tokenizer *t = o->tokenizer;
    json_t *root =
        json_pack("{s:s, s:{s:s, s:s, s:s, s:i, s:i}, s:I, s:I, s:I, s:I, s:b, s:b, s:s}", "format", format_name,
                  "tokenizer", "name", o->tokenizer_name != NULL ? o->tokenizer_name : tokenizer_kind(t), "kind",
                  tokenizer_kind(t), "hash", tokenizer_hash_text(t, hash), "vocab", (int)t->vocab, "eod", (int)t->eod,
                  "documents", (json_int_t)s->documents, "tokens", (json_int_t)s->tokens, "bytes", (json_int_t)s->bytes,
                  "bad_lines", (json_int_t)s->bad_lines, "eod_appended", t->eod >= 0 && o->chat == NULL,
                  "special_tokens_in_text", o->special, "key", o->key != NULL ? o->key : "");
    if (root != NULL && o->chat != NULL &&
        json_object_set_new(root, "chat",
                            json_pack("{s:s, s:s, s:s, s:I}", "template", o->chat->name, "hash",
                                      chat_hash_text(o->chat, hash), "loss_roles", o->loss_roles, "learned",
                                      (json_int_t)s->learned)) != 0) {
        json_decref(root);
        root = NULL;
    }
    if (root != NULL)
        text = json_dumps(root, JSON_INDENT(2));
    int st = text == NULL ? err_set(e, ST_NOMEM, "out of memory writing %s", path)
                          : file_write_atomic(path, text, strlen(text), e);
    free(text);
    json_decref(root);
    free(path);
    return st;
}

static void copy_text(char *to, size_t size, const json_t *from)
{
    snprintf(to, size, "%s", json_is_string(from) ? json_string_value(from) : "");
}

int token_manifest_parse(const char *text, size_t n, const char *path, struct token_manifest *m, struct err *e)
{
    json_error_t why;
    *m = (struct token_manifest){.found = true};
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    const json_t *tok = json_object_get(root, "tokenizer"), *chat = json_object_get(root, "chat");
    const char *format = json_string_value(json_object_get(root, "format"));
    copy_text(m->name, sizeof m->name, json_object_get(tok, "name"));
    copy_text(m->hash, sizeof m->hash, json_object_get(tok, "hash"));
    copy_text(m->key, sizeof m->key, json_object_get(root, "key"));
    copy_text(m->chat, sizeof m->chat, json_object_get(chat, "template"));
    copy_text(m->chat_hash, sizeof m->chat_hash, json_object_get(chat, "hash"));
    copy_text(m->loss_roles, sizeof m->loss_roles, json_object_get(chat, "loss_roles"));
    m->learned = json_integer_value(json_object_get(chat, "learned"));
    m->documents = json_integer_value(json_object_get(root, "documents"));
    m->tokens = json_integer_value(json_object_get(root, "tokens"));
    m->bytes = json_integer_value(json_object_get(root, "bytes"));
    m->bad_lines = json_integer_value(json_object_get(root, "bad_lines"));
    m->eod_appended = json_is_true(json_object_get(root, "eod_appended"));
    bool good = format != NULL && strcmp(format, format_name) == 0 && strlen(m->hash) == 16;
    json_decref(root);
    if (good)
        return ST_OK;
    err_set(e, ST_CORRUPT, "%s is not a manifest of tokens", path);
    return err_hint(e, "remove it to use the token file without knowing its tokenizer, or tokenize "
                       "again with --force");
}

int token_manifest_read(const char *prefix, struct token_manifest *m, struct err *e)
{
    *m = (struct token_manifest){0};
    char *path = manifest_path(prefix, e), *text;
    size_t n;
    if (path == NULL)
        return ST_NOMEM;
    int st = ST_OK;
    if (file_exists(path)) {
        st = file_read(path, MANIFEST_MAX, &text, &n, e);
        if (st == ST_OK) {
            st = token_manifest_parse(text, n, path, m, e);
            free(text);
        }
    }
    free(path);
    return st;
}

int token_manifest_check(const struct token_manifest *m, const char *prefix, int64_t tokens,
                         const struct tokenizer *tok, struct err *e)
{
    char hash[17];
    if (!m->found)
        return ST_OK;
    if (m->tokens != tokens) {
        err_set(e, ST_CORRUPT, "%s.tokens.json describes %lld tokens, but %s.idx holds %lld", prefix,
                (long long)m->tokens, prefix, (long long)tokens);
        return err_hint(e, "remove the manifest if the token file was made by another program");
    }
    if (tok == NULL || strcmp(m->hash, tokenizer_hash_text(tok, hash)) == 0)
        return ST_OK;
    err_set(e, ST_CONFLICT, "%s was made with the tokenizer %s (hash %s), but this run's has hash %s", prefix, m->name,
            m->hash, hash);
    return err_hint(e, "set data.tokenizer=%s, or tokenize the text again", m->name);
}

/* The same roles, in whatever order they are written. */
static bool same_roles(const char *a, const char *b)
{
    unsigned x = 0, y = 1;
    struct err e;
    return chat_roles_parse(a, &x, &e) == ST_OK && chat_roles_parse(b, &y, &e) == ST_OK && x == y;
}

int token_manifest_check_chat(const struct token_manifest *m, const char *prefix, bool has_loss,
                              const struct chat_template *chat, const char *loss_roles, struct err *e)
{
    char hash[17];
    bool talks = m->found && m->chat[0] != '\0';
    if (!has_loss && !talks)
        return ST_OK;
    if (has_loss != talks) {
        err_set(e, ST_CORRUPT, "%s: %s", prefix,
                has_loss ? "there is a .loss, but no .tokens.json that says whose messages are learned"
                         : "its .tokens.json says that it holds conversations, but its .loss is missing");
        return err_hint(e, "tokenize the conversations again, with --force");
    }
    if (chat == NULL) {
        err_set(e, ST_CONFLICT, "%s holds conversations (template %s, learned: %s), and data.chat is not set", prefix,
                m->chat, m->loss_roles);
        return err_hint(e, "set data.chat=%s and data.loss_roles=%s", m->chat, m->loss_roles);
    }
    if (strcmp(m->chat_hash, chat_hash_text(chat, hash)) != 0) {
        err_set(e, ST_CONFLICT, "%s was made with chat template %s (hash %s), but this run's is %s (hash %s)", prefix,
                m->chat, m->chat_hash, chat->name, hash);
        return err_hint(e, "set data.chat=%s, or tokenize the conversations again", m->chat);
    }
    if (same_roles(m->loss_roles, loss_roles))
        return ST_OK;
    err_set(e, ST_CONFLICT, "%s was made for data.loss_roles=%s, but this run has %s", prefix, m->loss_roles,
            loss_roles);
    return err_hint(e, "set data.loss_roles=%s, or tokenize the conversations again", m->loss_roles);
}
