/* braid import: a Hugging Face folder becomes a run folder with one checkpoint. braid export: the other way round. */
#include "cmd/cmd.h"
#include "cmd/verify_hf_int.h"
#include "train/interop.h"

#include <string.h>
#include <unistd.h>

static const char import_usage[] =
    "usage: braid import FOLDER OUT [--verify[=PYTHON | =GOLDEN.safetensors]] [--section.key=value ...]\n\n"
    "FOLDER holds config.json and safetensors files as transformers writes them; FP8 (128 x 128 blocks) and MXFP4 "
    "weights are\n"
    "dequantised. OUT, which must not exist, becomes a run folder with one checkpoint. --verify runs the folder's "
    "model in\n"
    "transformers (with python3, or the PYTHON that is named) on a fixed prompt and prints how far logits are apart. "
    "With a file\n"
    "no Python is needed: it holds tokens [batch, seq], logits, and maybe the gradient grad.NAME of every tensor of "
    "the folder;\n"
    "beyond 1e-5 of the largest logit or 1e-4 of a gradient's norm the exit code is 1. Then:\n"
    "  braid train --run.load=OUT --data.train=FILE --run.dir=runs/tuned      train on from it\n"
    "  braid generate OUT --generate.prompt=TEXT                              let it write\n"
    "  braid export OUT HF_FOLDER                                             back again\n";

static const char export_usage[] =
    "usage: braid export CHECKPOINT OUT [--format=hf] [--family=NAME] [--dtype=bf16|f32|fp8] [--shard=5g]\n"
    "                                   [--verify[=PYTHON | =GOLDEN.safetensors]]\n"
    "       braid export CHECKPOINT OUT.gguf --format=gguf [--dtype=bf16|f32|q8_0]\n"
    "       braid export CHECKPOINT OUT --format=peft [--dtype=f32|bf16] [--base=NAME]\n"
    "       braid export CHECKPOINT OUT --format=megatron [--dtype=bf16|f32] [--layout=flat|logical|stacked]\n\n"
    "CHECKPOINT is a run folder (its newest checkpoint) or a checkpoint folder. OUT must not exist.\n"
    "hf: a folder that transformers loads with from_pretrained. The family is the first that can express the model;\n"
    "    --family=NAME asks for one. --verify runs the folder in transformers and compares, as for braid import.\n"
    "    --dtype=fp8 stores projections as FP8 codes with a scale for 128 x 128 (weight_scale_inv), the rest as BF16.\n"
    "gguf: a file that llama.cpp runs, for models that are llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe in "
    "transformers.\n"
    "    Matrices are stored as --dtype says, vectors and routers as F32.\n"
    "    Both merge LoRA adapters into the weights.\n"
    "peft: the LoRA adapters alone, a folder that PEFT loads beside the base: PeftModel.from_pretrained(model, OUT). "
    "--base is\n"
    "    the name of the base in adapter_config.json.\n"
    "megatron: a folder with the names and parts of Megatron's distributed checkpoints, moments and fp32 master "
    "weights included;\n"
    "    tools/megatron_dist.py makes a torch_dist checkpoint of it. --layout=stacked is for Megatron's GPT models, "
    "the default\n"
    "    for its hybrid models. docs/MEGATRON.md explains both.\n";

/* ---- progress -------------------------------------------------------------------------------- */

struct bar {
    double started, drawn;
    bool live;
};

static void draw(void *ctx, int64_t done, int64_t all)
{
    struct bar *b = ctx;
    double now = time_now();
    char a[32], r[32];
    if (!b->live || (now - b->drawn < 0.2 && done < all))
        return;
    b->drawn = now;
    double seconds = now - b->started;
    fprintf(stderr, "\r%3.0f %%  %s, %s/s ", all > 0 ? 100.0 * (double)done / (double)all : 100.0,
            human_bytes((double)done, a, sizeof a), human_bytes(seconds > 0 ? (double)done / seconds : 0, r, sizeof r));
    if (done >= all)
        fputc('\n', stderr);
}

static struct bar bar_new(void) { return (struct bar){.started = time_now(), .live = isatty(STDERR_FILENO) != 0}; }

/* ---- import ---------------------------------------------------------------------------------- */

static void print_notes(const struct buf *notes)
{
    for (const char *line = notes->text; line != NULL && *line;) {
        size_t n = strcspn(line, "\n");
        fprintf(stderr, "note: %.*s\n", (int)n, line);
        line += n + (line[n] == '\n');
    }
}

int cmd_init_from(struct config *c, const char *folder, bool say, struct err *e)
{
    struct hf_folder *f = NULL;
    struct buf notes;
    buf_init(&notes, 0);
    int st = hf_open(&f, folder, e);
    if (st == ST_OK)
        st = hf_options(f, c, &notes, e);
    if (st == ST_OK)
        st = import_tokenizer(c, folder, &notes, e);
    if (st == ST_OK)
        st = config_set(c, "run.load_weights", folder, NULL, e);
    if (st == ST_OK && say)
        print_notes(&notes);
    hf_close(f);
    buf_release(&notes);
    return st;
}

/* The checkpoint just written beside the folder it came from. */
static int verify_import(const struct config *c, const char *with, const char *folder, const char *run_dir,
                         struct err *e)
{
    struct hf_check k = {.with = with, .folder = folder, .scratch = run_dir};
    struct ckpt *from = NULL;
    TRY(ckpt_open(&from, run_dir, e));
    k.from = from;
    int st = verify_hf(c, &k, e);
    ckpt_close(from);
    return st;
}

/* The folder just written: beside the checkpoint in transformers, or as braid reads it beside stored values. */
static int verify_export(const struct config *c, const struct export_opts *o, const char *with, const struct ckpt *from,
                         struct err *e)
{
    bool stored = str_ends(with, ".safetensors");
    struct hf_check k = {.with = with, .folder = o->path, .from = stored ? NULL : from, .scratch = o->path};
    k.rounded = o->dtype != DT_F32;
    return verify_hf(c, &k, e);
}

static int run_import(struct config *c, struct hf_folder **f, struct buf *notes, int argc, char **argv, struct err *e)
{
    struct config_extra extra[] = {{.name = "verify", .alone = "python3"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    struct bar bar = bar_new();
    struct interop_progress progress = {draw, &bar};
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 2, e));
    if (args.n_positional < 2)
        return err_set(e, ST_USAGE, "braid import needs a folder to read and one to write");
    const char *from = args.positional[0], *to = args.positional[1];
    if (!hf_is_folder(from)) {
        err_set(e, ST_INVALID, "%s is no folder with a config.json", from);
        return err_hint(e, "a model folder of Hugging Face holds config.json and model*.safetensors");
    }
    bool free_name;
    TRY(cmd_free_name(to, &free_name, e));
    if (!free_name)
        return err_set(e, ST_CONFLICT, "%s exists; import writes a new run folder", to);
    TRY(hf_open(f, from, e));
    TRY(hf_options(*f, c, notes, e));
    TRY(import_tokenizer(c, from, notes, e));
    TRY(cmd_finish(c, e));
    int st = import_hf(*f, c, to, &progress, notes, e);
    if (st != ST_OK) {
        file_remove_tree(to, NULL);
        return st;
    }
    print_notes(notes);
    printf("imported %s model: %s\n", hf_family_name(*f), to);
    return extra[0].value != NULL ? verify_import(c, extra[0].value, from, to, e) : ST_OK;
}

int cmd_import(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, import_usage, false))
        return 0;
    struct config c = {.run = {.seed = 0}};
    struct hf_folder *f = NULL;
    struct buf notes;
    struct err e = {0};
    buf_init(&notes, 0);
    int code = cmd_exit(run_import(&c, &f, &notes, argc, argv, &e), &e);
    hf_close(f);
    buf_release(&notes);
    config_release(&c);
    return code;
}

/* ---- export ---------------------------------------------------------------------------------- */

/* The words of braid export that say what is written. */
struct target {
    bool gguf, megatron, peft;
    const char *base;   /* for PEFT */
    const char *layout; /* of keys, for Megatron; NULL: by the pattern */
    enum gguf_type type;
    struct export_opts opts;
};

/* The words of `braid export`, in the order of its table. */
enum { EXPORT_FORMAT, EXPORT_FAMILY, EXPORT_DTYPE, EXPORT_SHARD, EXPORT_LAYOUT, EXPORT_BASE, EXPORT_VERIFY };

static int read_target(struct target *t, const struct config_extra *extra, struct err *e)
{
    const char *format = extra[EXPORT_FORMAT].value, *shard = extra[EXPORT_SHARD].value;
    t->peft = format != NULL && strcmp(format, "peft") == 0;
    const char *dtype = extra[EXPORT_DTYPE].value ? extra[EXPORT_DTYPE].value : t->peft ? "f32" : "bf16";
    if (format != NULL && strcmp(format, "hf") != 0 && strcmp(format, "gguf") != 0 && strcmp(format, "megatron") != 0 &&
        !t->peft)
        return err_set(e, ST_USAGE, "--format=%s: hf, gguf, peft and megatron can be written", format);
    t->base = extra[EXPORT_BASE].value;
    if (t->base != NULL && !t->peft)
        return err_set(e, ST_USAGE, "--base belongs to --format=peft");
    t->gguf = format != NULL && strcmp(format, "gguf") == 0;
    t->megatron = format != NULL && strcmp(format, "megatron") == 0;
    if ((t->gguf || t->megatron) && (extra[EXPORT_FAMILY].value != NULL || shard != NULL))
        return err_set(e, ST_USAGE, "--family and --shard belong to --format=hf");
    if ((t->gguf || t->megatron || t->peft) && extra[EXPORT_VERIFY].value != NULL)
        return err_set(e, ST_USAGE, "--verify belongs to --format=hf");
    t->layout = extra[EXPORT_LAYOUT].value;
    if (t->layout != NULL && !t->megatron)
        return err_set(e, ST_USAGE, "--layout belongs to --format=megatron");
    if (t->gguf && !gguf_type_from_name(dtype, &t->type))
        return err_set(e, ST_USAGE, "--dtype=%s: f32, bf16 and q8_0 can be written to GGUF", dtype);
    bool codes = !t->gguf && !t->megatron && !t->peft && strcmp(dtype, "fp8") == 0;
    if (!t->gguf && !codes && strcmp(dtype, "bf16") != 0 && strcmp(dtype, "f32") != 0)
        return err_set(e, ST_USAGE, "--dtype=%s: bf16 and f32 can be written, fp8 with --format=hf", dtype);
    t->opts.dtype = codes ? DT_F8_E4M3 : strcmp(dtype, "f32") == 0 ? DT_F32 : DT_BF16;
    t->opts.shard_bytes = 5000000000;
    if (shard != NULL && (!parse_i64(shard, &t->opts.shard_bytes) || t->opts.shard_bytes < 1))
        return err_set(e, ST_USAGE, "--shard=%s is no number of bytes, such as 5g", shard);
    t->opts.family = extra[EXPORT_FAMILY].value;
    return ST_OK;
}

/* What a checkpoint carries beside its tensors: the tokenizer and what belongs to it. */
static int carried_files(const struct ckpt *from, struct arena *a, const char **list, int most, struct err *e)
{
    int n = 0;
    for (int i = 0; i < tokenizer_n_carried() && n < most; i++) {
        const char *path = arena_printf(a, "%s/%s", ckpt_path(from), tokenizer_carried(i));
        if (path == NULL)
            return -err_set(e, ST_NOMEM, "out of memory");
        if (file_exists(path))
            list[n++] = path;
    }
    return n;
}

static int to_megatron(const struct ckpt *from, const struct config *c, const struct target *t, struct err *e)
{
    struct buf notes;
    buf_init(&notes, 0);
    int st = export_megatron(from, c, &t->opts, t->layout, &notes, e);
    if (st == ST_OK) {
        print_notes(&notes);
        printf("exported for Megatron: %s\n", t->opts.path);
    }
    buf_release(&notes);
    return st;
}

/* Other programs know one number of tokens, that of the embedding's rows; those that model.vocab_multiple adds are
 * trained like the rest, and part of every softmax. */
static void count_all_tokens(struct config_model *m)
{
    m->vocab = padded_vocab(m);
    m->vocab_multiple = 1;
}

static int run_export(struct config *c, struct ckpt **from, int argc, char **argv, struct err *e)
{
    struct config_extra extra[] = {
        [EXPORT_FORMAT] = {.name = "format"},
        [EXPORT_FAMILY] = {.name = "family"},
        [EXPORT_DTYPE] = {.name = "dtype"},
        [EXPORT_SHARD] = {.name = "shard"},
        [EXPORT_LAYOUT] = {.name = "layout"},
        [EXPORT_BASE] = {.name = "base"},
        [EXPORT_VERIFY] = {.name = "verify", .alone = "python3"},
    };
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    struct bar bar = bar_new();
    struct interop_progress progress = {draw, &bar};
    struct target t = {.opts = {.progress = &progress}};
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 2, e));
    if (args.n_positional < 2)
        return err_set(e, ST_USAGE, "braid export needs a checkpoint and a folder or file to write");
    TRY(read_target(&t, extra, e));
    t.opts.path = args.positional[1];
    TRY(cmd_open_checkpoint(c, &args, from, e));
    TRY(cmd_finish(c, e));
    count_all_tokens(&c->model);
    if (t.gguf) {
        TRY(export_gguf(*from, c, &t.opts, t.type, e));
        printf("exported as GGUF: %s\n", t.opts.path);
        return ST_OK;
    }
    if (t.peft) {
        TRY(export_peft(*from, c, &t.opts, t.base, e));
        printf("exported for PEFT: %s\n", t.opts.path);
        return ST_OK;
    }
    if (t.megatron && c->lora.rank > 0) {
        err_set(e, ST_UNSUPPORTED, "%s has LoRA adapters, which Megatron's checkpoints have no place for",
                ckpt_path(*from));
        return err_hint(e, "`braid ckpt merge` adds them to the weights first");
    }
    if (t.megatron)
        return to_megatron(*from, c, &t, e);
    TRY(hf_family_of(c, t.opts.family, &t.opts.family, e));
    const char *files[16];
    struct arena names;
    arena_init(&names);
    int st = carried_files(*from, &names, files, countof(files), e);
    t.opts.extra_files = files;
    t.opts.n_extra_files = st > 0 ? st : 0;
    st = st < 0 ? -st : export_hf(*from, c, &t.opts, e);
    arena_release(&names);
    TRY(st);
    printf("exported as %s: %s\n", t.opts.family, t.opts.path);
    return extra[EXPORT_VERIFY].value != NULL ? verify_export(c, &t.opts, extra[EXPORT_VERIFY].value, *from, e) : ST_OK;
}

int cmd_export(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, export_usage, false))
        return 0;
    struct config c = {.run = {.seed = 0}};
    struct ckpt *from = NULL;
    struct err e = {0};
    int code = cmd_exit(run_export(&c, &from, argc, argv, &e), &e);
    ckpt_close(from);
    config_release(&c);
    return code;
}
