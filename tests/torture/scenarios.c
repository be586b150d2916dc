/* See scenarios.h. */
#include "scenarios.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define TRAIN                                                                                                          \
    "train", "%R/configs/tiny.ini", "--data.train=%B/text.txt", "--data.split=90,10", "--train.eval_every=3",          \
        "--train.eval_batches=1", "--train.steps=6", "--run.save_every=2", "--run.threads=1", "--run.quiet=on",        \
        "--run.dir=run"
#define LAST "run/checkpoints/step-00000006/"

const struct scenario scenarios[] = {
    {"train", {TRAIN}, .files = {LAST "model.safetensors", LAST "optim.safetensors", LAST "config.ini"}, .again = true},
    {"resume",
     {TRAIN},
     .start = "half",
     .files = {LAST "model.safetensors", LAST "optim.safetensors", LAST "config.ini"},
     .again = true},
    {"async",
     {TRAIN, "--run.async_save=on"},
     .files = {LAST "model.safetensors", LAST "optim.safetensors", LAST "config.ini"},
     .again = true},
    {"shards",
     {TRAIN, "--parallel.ranks=2", "--run.async_save=on"},
     .files = {LAST "model-00001-of-00002.safetensors", LAST "model-00002-of-00002.safetensors",
               LAST "optim-00001-of-00002.safetensors", LAST "optim-00002-of-00002.safetensors"},
     .again = true},
    {"generate",
     {"generate", "%B/run", "--generate.tokens=8", "--generate.prompt=line", "--run.threads=1"},
     .files = {NULL}},
    {"eval",
     {"eval", "%B/run", "--data.valid=%B/text.txt", "--train.eval_batches=1", "--run.threads=1"},
     .files = {NULL}},
    {"convert",
     {"ckpt", "convert", "%B/run", "run", "--layout=stacked"},
     .files = {LAST "model.safetensors", LAST "optim.safetensors"}},
    {"import",
     {"import", "%R/tests/hf/fixtures/qwen2", "run"},
     .files = {"run/checkpoints/step-00000000/model.safetensors"}},
    {"export", {"export", "%B/imported", "out"}, .files = {"out/model.safetensors", "out/config.json"}},
    {"gguf", {"export", "%B/imported", "out.gguf", "--format=gguf"}, .files = {"out.gguf"}},
    {"tune",
     {TRAIN, "--lora.rank=2", "--model.pattern=[*-][*-]"},
     .files = {LAST "model.safetensors", LAST "optim.safetensors"},
     .again = true},
    {"merge", {"ckpt", "merge", "%B/tuned", "run"}, .files = {LAST "model.safetensors"}, .small = true},
    {"peft",
     {"export", "%B/tuned", "out", "--format=peft"},
     .files = {"out/adapter_model.safetensors", "out/adapter_config.json"},
     .small = true},
    {"verify", {"ckpt", "verify", "%B/run"}, .files = {NULL}, .small = true},
    {"tokenize",
     {"data", "tokenize", "--in", "%B/text.txt", "--out", "tok", "--run.threads=1"},
     .files = {"tok.bin", "tok.idx"},
     .small = true},
    {"replace",
     {"data", "tokenize", "--in", "%B/text.txt", "--out", "run/tok", "--append-eod", "--force", "--run.threads=1"},
     .start = "pair",
     .files = {"run/tok.bin", "run/tok.idx"},
     .small = true,
     .again = true,
     .together = true},
    {"chat",
     {"data", "tokenize", "--in", "%R/tests/torture/chat.jsonl", "--out", "chat", "--data.chat=chatml",
      "--run.threads=1"},
     .files = {"chat.bin", "chat.idx", "chat.loss"},
     .small = true},
    {"bpe",
     {"data", "train-tokenizer", "--in", "%B/text.txt", "--out", "bpe", "--vocab=270", "--force", "--run.threads=1"},
     .files = {"bpe.json", "bpe.tiktoken"},
     .again = true},
    {"info", {"data", "info", "%B/tok", "--scan"}, .files = {NULL}, .small = true},
    {"plan", {"plan", "%R/configs/tiny.ini"}, .files = {NULL}},
};
const int n_scenarios = countof(scenarios);

/* ---- running --------------------------------------------------------------------------------- */

static void expand(const struct place *p, const char *word, char *out, size_t size)
{
    size_t n = 0;
    for (; *word != '\0' && n + 1 < size; word++) {
        const char *with = word[0] == '%' && word[1] == 'B'   ? p->base
                           : word[0] == '%' && word[1] == 'R' ? p->root
                                                              : NULL;
        if (with == NULL) {
            out[n++] = *word;
            continue;
        }
        n += (size_t)snprintf(out + n, size - n, "%s", with);
        word++;
    }
    out[n < size ? n : size - 1] = '\0';
}

static void beside(const char *dir, const char *what, const char *tag, char *out, size_t size)
{
    snprintf(out, size, "%s.%s-%s", dir, what, tag);
}

static void become(const struct place *p, const struct scenario *s, const char *dir, const char *const *env,
                   const char *tag)
{
    char words[MOST_WORDS][512], path[4096];
    char *argv[MOST_WORDS + 2] = {(char *)(uintptr_t)p->braid};
    for (int i = 0; s->words[i] != NULL; i++) {
        expand(p, s->words[i], words[i], sizeof words[i]);
        argv[i + 1] = words[i];
    }
    static const char *const streams[] = {"out", "err"};
    for (int i = 0; i < 2; i++) {
        beside(dir, streams[i], tag, path, sizeof path);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        if (fd < 0 || dup2(fd, i + 1) < 0)
            _exit(99);
        close(fd);
    }
    for (; env != NULL && *env != NULL; env++)
        putenv((char *)(uintptr_t)*env);
    alarm(60);
    if (chdir(dir) == 0)
        execv(p->braid, argv);
    _exit(98);
}

static bool copy_tree(const char *from, const char *to)
{
    pid_t child = fork();
    if (child == 0) {
        execlp("cp", "cp", "-r", from, to, (char *)NULL);
        _exit(97);
    }
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

int run_scenario(const struct place *p, const struct scenario *s, const char *dir, const char *const *env, bool keep,
                 const char *tag)
{
    struct err e = {0};
    char from[4096], to[4096];
    if (!keep) {
        snprintf(from, sizeof from, "%s/%s", p->base, s->start ? s->start : "");
        snprintf(to, sizeof to, "%s/run", dir);
        if (file_remove_tree(dir, &e) != ST_OK || file_make_dirs(dir, &e) != ST_OK ||
            (s->start != NULL && !copy_tree(from, to))) {
            err_print(&e, stderr);
            return -1;
        }
    }
    pid_t child = fork();
    if (child == 0)
        become(p, s, dir, env, tag);
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child ? status : -1;
}

/* ---- judging --------------------------------------------------------------------------------- */

static bool same_file(const char *a, const char *b, char *why, size_t size)
{
    struct file_id x, y;
    struct err e = {0};
    if (file_identify(a, &x, &e) != ST_OK || file_identify(b, &y, &e) != ST_OK) {
        snprintf(why, size, "%s", e.msg);
        return false;
    }
    if (x.bytes == y.bytes && x.xxh3 == y.xxh3)
        return true;
    snprintf(why, size, "%s differs from the reference", a);
    return false;
}

bool same_results(const struct place *p, const struct scenario *s, const char *dir, const char *tag, char *why,
                  size_t size)
{
    char a[4096], b[4096];
    if (s->files[0] == NULL) {
        beside(dir, "out", tag, a, sizeof a);
        snprintf(b, sizeof b, "%s/ref-%s.out-ref", p->base, s->name);
        return same_file(a, b, why, size);
    }
    for (int i = 0; i < MOST_FILES && s->files[i] != NULL; i++) {
        snprintf(a, sizeof a, "%s/%s", dir, s->files[i]);
        snprintf(b, sizeof b, "%s/ref-%s/%s", p->base, s->name, s->files[i]);
        if (!same_file(a, b, why, size))
            return false;
    }
    return true;
}

bool files_fit(const struct place *p, const struct scenario *s, const char *dir)
{
    char here[4096], old[4096], new[4096], why[256];
    int n = 0, n_here = 0, n_old = 0, n_new = 0;
    for (; s->together && n < MOST_FILES && s->files[n] != NULL; n++) {
        snprintf(here, sizeof here, "%s/%s", dir, s->files[n]);
        snprintf(old, sizeof old, "%s/%s/%s", p->base, s->start, s->files[n] + strlen("run/"));
        snprintf(new, sizeof new, "%s/ref-%s/%s", p->base, s->name, s->files[n]);
        n_here += file_exists(here);
        n_old += same_file(here, old, why, sizeof why);
        n_new += same_file(here, new, why, sizeof why);
    }
    return n_here < n || n_old == n || n_new == n;
}

bool has_leftovers(const char *dir, char *found, size_t size)
{
    char **names;
    int n;
    bool left = false;
    if (file_list_dir(dir, &names, &n, NULL) != ST_OK)
        return false;
    for (int i = 0; i < n && !left; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        left = strstr(names[i], ".tmp-") != NULL || strstr(names[i], ".old-") != NULL || strcmp(names[i], "lock") == 0;
        if (left)
            snprintf(found, size, "%s", path);
        else if (file_is_dir(path))
            left = has_leftovers(path, found, size);
    }
    file_free_list(names, n);
    return left;
}

void print_tail(const char *dir, const char *tag)
{
    char path[4096], *text;
    size_t n;
    beside(dir, "err", tag, path, sizeof path);
    if (file_read(path, 1 << 20, &text, &n, NULL) != ST_OK)
        return;
    printf("    %s\n", n > 600 ? text + n - 600 : text);
    free(text);
}

bool said_something(const char *dir, const char *tag)
{
    char path[4096];
    beside(dir, "err", tag, path, sizeof path);
    return file_size(path) > 0;
}

bool said(const char *dir, const char *tag, const char *text)
{
    char path[4096], *all;
    size_t n;
    beside(dir, "err", tag, path, sizeof path);
    if (file_read(path, 1 << 20, &all, &n, NULL) != ST_OK)
        return false;
    bool found = strstr(all, text) != NULL;
    free(all);
    return found;
}

/* ---- inputs and references ------------------------------------------------------------------- */

static bool reference(const struct place *p, const struct scenario *s)
{
    char dir[4096];
    snprintf(dir, sizeof dir, "%s/ref-%s", p->base, s->name);
    int status = run_scenario(p, s, dir, NULL, false, "ref");
    if (status == 0)
        return true;
    printf("torture: the command '%s' fails without any fault (status %d)\n", s->name, status);
    print_tail(dir, "ref");
    return false;
}

static const struct scenario *by_name(const char *name)
{
    for (int i = 0; i < n_scenarios; i++)
        if (strcmp(scenarios[i].name, name) == 0)
            return &scenarios[i];
    return NULL;
}

/* A run of step 6; "half", the same as if it had ended after step 4; token files; then the results of every command. */
bool prepare_base(const struct place *p)
{
    static const char *const first[] = {"train", "tokenize", "import", "tune"}; /* others read what these write */
    static const char *const copies[][2] = {{"ref-import/run", "imported"},
                                            {"ref-tune/run", "tuned"},
                                            {"ref-train/run", "run"},
                                            {"ref-train/run", "half"},
                                            {"ref-tokenize/tok.bin", "tok.bin"},
                                            {"ref-tokenize/tok.bin", "pair/tok.bin"},
                                            {"ref-tokenize/tok.idx", "pair/tok.idx"},
                                            {"ref-tokenize/tok.idx", "tok.idx"}};
    char path[4096], from[4096];
    struct buf text;
    snprintf(path, sizeof path, "%s/pair", p->base);
    if (file_make_dirs(path, NULL) != ST_OK)
        return false;
    struct err e = {0};
    buf_init(&text, 0);
    for (int i = 0; i < 300; i++)
        buf_addf(&text, "line %d: %d apples, %d pears and a plum.\n", i, i * i % 97, i * 7 % 13);
    snprintf(path, sizeof path, "%s/text.txt", p->base);
    int st = file_write_atomic(path, text.text, text.len, &e);
    buf_release(&text);
    if (st != ST_OK) {
        err_print(&e, stderr);
        return false;
    }
    for (int i = 0; i < countof(first); i++)
        if (!reference(p, by_name(first[i])))
            return false;
    for (int i = 0; i < countof(copies); i++) {
        snprintf(from, sizeof from, "%s/%s", p->base, copies[i][0]);
        snprintf(path, sizeof path, "%s/%s", p->base, copies[i][1]);
        if (!copy_tree(from, path))
            return false;
    }
    snprintf(path, sizeof path, "%s/half/checkpoints/step-00000006", p->base);
    if (file_remove_tree(path, &e) != ST_OK)
        return false;
    for (int i = 0; i < n_scenarios; i++) {
        bool done = false;
        for (int k = 0; k < countof(first); k++)
            done |= strcmp(scenarios[i].name, first[k]) == 0;
        if (!done && !reference(p, &scenarios[i]))
            return false;
    }
    return true;
}
