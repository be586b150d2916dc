/* --verify of import and export: a model beside the same model in another program. What the other program computes
 * comes from a stored file, or from transformers itself, which is run for it in a process of its own. */
#include "cmd/verify_hf_int.h"
#include "train/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Words: folder, output file, tokens of a sequence. */
static const char script[] =
    "import sys\n"
    "try:\n"
    "    import torch, transformers\n"
    "    from safetensors.torch import save_file\n"
    "except ImportError as problem:\n"
    "    sys.exit(f'{sys.executable} has no transformers: {problem}')\n"
    "folder, out, n = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
    "model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, "
    "attn_implementation='eager',\n"
    "                                                          local_files_only=True).float().eval()\n"
    "vocab = model.get_input_embeddings().num_embeddings\n"
    "tokens = (torch.arange(2 * n) * 7919 % vocab).reshape(2, n)\n"
    "with torch.no_grad():\n"
    "    logits = model(tokens, use_cache=False).logits.float().contiguous()\n"
    "save_file({'tokens': tokens.int(), 'logits': logits}, out)\n";

/* ---- transformers ---------------------------------------------------------------------------- */

/* The last words of a program that failed: its reason. */
static int python_failed(const char *python, const char *log, struct err *e)
{
    char *text = NULL;
    size_t len = 0;
    struct err ignored = {0};
    if (file_read(log, 1 << 20, &text, &len, &ignored) != ST_OK)
        len = 0;
    while (len > 0 && (text[len - 1] == '\n' || text[len - 1] == ' '))
        len--;
    size_t from = len;
    while (from > 0 && text[from - 1] != '\n' && len - from < 300)
        from--;
    err_set(e, ST_INVALID, "%s could not run the model: %.*s", python, (int)(len - from), len > 0 ? text + from : "");
    free(text);
    return err_hint(e, "--verify=PYTHON names a Python that has torch, transformers and safetensors; "
                       "--verify=FILE.safetensors needs none");
}

static int run_python(const char *python, const char *folder, const char *out, const char *log, int64_t seq,
                      struct err *e)
{
    posix_spawn_file_actions_t files;
    char tokens[32];
    pid_t child;
    int status = 0;
    snprintf(tokens, sizeof tokens, "%lld", (long long)seq);
    const char *const words[] = {python, "-c", script, folder, out, tokens, NULL};
    if (posix_spawn_file_actions_init(&files) != 0)
        return err_set(e, ST_NOMEM, "out of memory");
    bool set = posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0) == 0 &&
               posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0) == 0 &&
               posix_spawn_file_actions_addopen(&files, STDERR_FILENO, log, O_WRONLY | O_CREAT | O_TRUNC, 0600) == 0;
    /* posix_spawn takes words that it does not change. */
    int problem = set ? posix_spawnp(&child, python, &files, NULL, (char *const *)(uintptr_t)words, environ) : ENOMEM;
    posix_spawn_file_actions_destroy(&files);
    if (problem != 0) {
        err_set(e, ST_INVALID, "cannot run %s: %s", python, strerror(problem));
        return err_hint(e, "--verify=PYTHON names a Python that has transformers");
    }
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return err_errno(e, "cannot wait for %s", python);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? ST_OK : python_failed(python, log, e);
}

/* ---- comparison ------------------------------------------------------------------------------ */

static int compare(const struct hf_check *k, struct config *c, const char *golden, struct probe_difference *d,
                   struct err *e)
{
    struct probe p = {.loss = 0};
    struct probe_batch b = {.batch = 0};
    struct st_file *in = NULL;
    int st;
    TRY(st_open(&in, golden, e));
    TRY_OUT(probe_batch_read(&b, in, golden, e));
    TRY_OUT(probe_run(&p, c, &b, k->from, e));
    st = probe_compare(&p, c, golden, k->folder, d, e);
out:
    probe_release(&p);
    probe_batch_release(&b);
    st_close(in);
    return st;
}

static int judge(const struct hf_check *k, const char *with, bool stored, const struct probe_difference *d,
                 struct err *e)
{
    /* A stored file of a small model is met to the last bits of fp32; models of any depth, and weights rounded to bf16,
     * by what they predict. */
    bool same = stored       ? d->logits <= 1e-5 && d->gradient <= 1e-4
                : k->rounded ? d->kl <= 1e-2
                             : d->logits <= 1e-3 && d->kl <= 1e-6;
    printf("verify: %s: logits differ by %.2e of the largest, KL %.2e nats", with, d->logits, d->kl);
    if (d->n_gradients > 0)
        printf("; %d gradients by at most %.2e of their norm (%s)", d->n_gradients, d->gradient, d->worst);
    printf("%s\n", k->rounded ? " (weights rounded to bf16)" : "");
    if (same)
        return ST_OK;
    return err_set(e, ST_CONFLICT, "the model differs from %s by more than %s", with,
                   k->rounded && !stored ? "bf16 rounding" : "fp32 rounding");
}

static int with_transformers(const struct hf_check *k, struct config *c, const char *tmp, struct probe_difference *d,
                             struct err *e)
{
    enum { TOKENS = 16 };
    int64_t seq = c->model.position == CFG_POSITION_LEARNED ? min_i64(TOKENS, c->model.max_position) : TOKENS;
    char *out = path_join(tmp, "logits.safetensors"), *log = path_join(tmp, "log");
    int st = out != NULL && log != NULL ? run_python(k->with, k->folder, out, log, seq, e)
                                        : err_set(e, ST_NOMEM, "out of memory");
    if (st == ST_OK)
        st = compare(k, c, out, d, e);
    free(out);
    free(log);
    return st;
}

int verify_hf(const struct config *given, const struct hf_check *k, struct err *e)
{
    struct config c = *given; /* sizes of a batch change in the copy; strings stay the original's */
    struct probe_difference d = {0};
    bool stored = str_ends(k->with, ".safetensors");
    char tmp[FILE_TEMP_MAX];
    int fd = -1;
    if (k->from == NULL)
        c.run.load_weights = k->folder;
    if (stored) {
        TRY(compare(k, &c, k->with, &d, e));
        return judge(k, k->with, true, &d, e);
    }
    TRY(file_temp_dir(k->scratch, tmp, &fd, e));
    int st = with_transformers(k, &c, tmp, &d, e);
    file_remove_tree(tmp, NULL);
    close(fd);
    TRY(st);
    return judge(k, "transformers", false, &d, e);
}
