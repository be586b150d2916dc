/* Writing GGUF: what llama.cpp must know of a model as keys and values, then its tensors, aligned, each written as it
 * is made. */
#include "hf/gguf.h"

#include "hf/gguf_arch_int.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALIGNMENT = 32, VERSION = 3, Q8_BLOCK = 32, Q8_BYTES = 34 };
/* Types of values, as the format numbers them. */
enum { KV_U32 = 4, KV_I32 = 5, KV_F32 = 6, KV_BOOL = 7, KV_STRING = 8, KV_ARRAY = 9 };

static const struct {
    const char *name;
    uint32_t number, file_type;
} types[] = {[GGUF_F32] = {"f32", 0, 0}, [GGUF_BF16] = {"bf16", 30, 32}, [GGUF_Q8_0] = {"q8_0", 8, 7}};

bool gguf_type_from_name(const char *name, enum gguf_type *out)
{
    for (int i = 0; i < countof(types); i++)
        if (strcmp(name, types[i].name) == 0) {
            *out = (enum gguf_type)i;
            return true;
        }
    return false;
}

/* ---- the header ------------------------------------------------------------------------------ */

struct header {
    struct buf bytes; /* of keys and values */
    uint64_t n;
};

/* Little-endian, as all machines are that braid runs on. */
static void put_u32(struct buf *b, uint32_t v) { buf_add_n(b, &v, sizeof v); }
static void put_u64(struct buf *b, uint64_t v) { buf_add_n(b, &v, sizeof v); }
static void put_string(struct buf *b, const char *s)
{
    put_u64(b, strlen(s));
    buf_add(b, s);
}

static void key(struct header *h, const char *name, uint32_t type)
{
    put_string(&h->bytes, name);
    put_u32(&h->bytes, type);
    h->n++;
}

void gguf_string(struct header *h, const char *name, const char *value)
{
    key(h, name, KV_STRING);
    put_string(&h->bytes, value);
}
void gguf_u32(struct header *h, const char *name, int64_t value)
{
    key(h, name, KV_U32);
    put_u32(&h->bytes, (uint32_t)value);
}
void gguf_f32(struct header *h, const char *name, double value)
{
    float v = (float)value;
    key(h, name, KV_F32);
    buf_add_n(&h->bytes, &v, sizeof v);
}
static void put_bool(struct header *h, const char *name, bool value)
{
    key(h, name, KV_BOOL);
    buf_add_n(&h->bytes, &(uint8_t){value}, 1);
}
static void put_array(struct header *h, const char *name, uint32_t type, int64_t n)
{
    key(h, name, KV_ARRAY);
    put_u32(&h->bytes, type);
    put_u64(&h->bytes, (uint64_t)n);
}

static void put_vocab(struct header *h, const struct gguf_vocab *v)
{
    if (v == NULL) {
        gguf_string(h, "tokenizer.ggml.model", "none");
        return;
    }
    gguf_string(h, "tokenizer.ggml.model", v->model);
    gguf_string(h, "tokenizer.ggml.pre", v->pre);
    put_array(h, "tokenizer.ggml.tokens", KV_STRING, v->n);
    for (int64_t i = 0; i < v->n; i++)
        put_string(&h->bytes, v->tokens[i]);
    put_array(h, "tokenizer.ggml.token_type", KV_I32, v->n);
    buf_add_n(&h->bytes, v->types, (size_t)v->n * sizeof *v->types);
    put_array(h, "tokenizer.ggml.merges", KV_STRING, v->n_merges);
    for (int64_t i = 0; i < v->n_merges; i++)
        put_string(&h->bytes, v->merges[i]);
    if (v->bos >= 0)
        gguf_u32(h, "tokenizer.ggml.bos_token_id", v->bos);
    if (v->eos >= 0)
        gguf_u32(h, "tokenizer.ggml.eos_token_id", v->eos);
    put_bool(h, "tokenizer.ggml.add_bos_token", v->add_bos);
    if (v->chat_template != NULL)
        gguf_string(h, "tokenizer.chat_template", v->chat_template);
}

/* ---- tensors --------------------------------------------------------------------------------- */

struct file {
    int fd;
    const char *path;
    struct hf_out out;
    enum gguf_type type;
    void *narrow;
    size_t narrow_cap;
    int64_t done, all;
};

/* Matrices get the type asked for where their rows allow it; llama.cpp wants vectors and routers in F32. */
static enum gguf_type type_of(const struct file *f, const struct hf_out_tensor *t)
{
    int64_t cols = t->shape.rank > 0 ? t->shape.dim[t->shape.rank - 1] : 0;
    if (t->keep_f32 || t->shape.rank < 2 || strstr(t->name, "ffn_gate_inp") != NULL)
        return GGUF_F32;
    return f->type == GGUF_Q8_0 && cols % Q8_BLOCK != 0 ? GGUF_BF16 : f->type;
}

static int64_t bytes_of(enum gguf_type type, int64_t n)
{
    return type == GGUF_F32 ? 4 * n : type == GGUF_BF16 ? 2 * n : n / Q8_BLOCK * Q8_BYTES;
}

static void quantise_q8(const float *x, int64_t n, uint8_t *out)
{
    for (int64_t b = 0; b < n / Q8_BLOCK; b++, x += Q8_BLOCK, out += Q8_BYTES) {
        float most = 0;
        for (int i = 0; i < Q8_BLOCK; i++)
            most = fmaxf(most, fabsf(x[i]));
        float scale = most / 127, inverse = scale > 0 ? 1 / scale : 0;
        uint16_t half = f32_to_f16(scale);
        memcpy(out, &half, sizeof half);
        for (int i = 0; i < Q8_BLOCK; i++)
            out[2 + i] = (uint8_t)(int8_t)roundf(x[i] * inverse);
    }
}

static int write_tensor(struct file *f, const struct hf_out_tensor *t, struct err *e)
{
    static const char zeros[ALIGNMENT];
    enum gguf_type type = type_of(f, t);
    int64_t n = tensor_elems(&t->shape), bytes = bytes_of(type, n);
    float *values;
    const void *data;
    TRY(hf_out_values(&f->out, t, &values, e));
    data = values;
    if (type != GGUF_F32) {
        TRY(mem_grow(&f->narrow, &f->narrow_cap, (size_t)bytes, 1, e));
        struct tensor wide = tensor_1d(values, DT_F32, n), narrow = tensor_1d(f->narrow, DT_BF16, n);
        if (type == GGUF_BF16)
            tensor_convert(&narrow, &wide);
        else
            quantise_q8(values, n, f->narrow);
        data = f->narrow;
    }
    TRY(file_write_fd(f->fd, data, (size_t)bytes, f->path, e));
    TRY(file_write_fd(f->fd, zeros, (size_t)(round_up(bytes, ALIGNMENT) - bytes), f->path, e));
    f->done += bytes;
    if (f->out.x->progress != NULL)
        f->out.x->progress(f->out.x->ctx, f->done, f->all);
    return ST_OK;
}

static void put_info(struct buf *b, const char *name, const struct tensor *shape, uint32_t type, int64_t at)
{
    put_string(b, name);
    put_u32(b, (uint32_t)shape->rank);
    for (int d = shape->rank - 1; d >= 0; d--)
        put_u64(b, (uint64_t)shape->dim[d]);
    put_u32(b, type);
    put_u64(b, (uint64_t)at);
}

/* Divisors of rotary frequencies, for the scaling that llama.cpp has no formula of. */
#define ROPE_FREQS "rope_freqs.weight"

static int write_all(struct file *f, const struct gguf_arch *arch, const struct gguf_vocab *vocab, struct err *e)
{
    struct header h = {.n = 0};
    struct buf infos, start;
    float divisors[GGUF_MAX_ROPE];
    struct tensor rope = tensor_1d(divisors, DT_F32, gguf_rope_divisors(f->out.x->config, divisors));
    int64_t at = 0, n_rope = rope.dim[0];
    int st;
    buf_init(&h.bytes, 0);
    buf_init(&infos, 0);
    buf_init(&start, 0);
    gguf_string(&h, "general.architecture", arch->family.model_type);
    gguf_u32(&h, "general.alignment", ALIGNMENT);
    gguf_u32(&h, "general.file_type", types[f->type].file_type);
    TRY_OUT(gguf_arch_keys(arch, f->out.x->config, &h, e));
    put_vocab(&h, vocab);
    for (int i = 0; i < f->out.n_tensors; i++) {
        struct hf_out_tensor *t = &f->out.tensors[i];
        int64_t bytes = bytes_of(type_of(f, t), tensor_elems(&t->shape));
        put_info(&infos, t->name, &t->shape, types[type_of(f, t)].number, at);
        at += round_up(bytes, ALIGNMENT);
        f->all += bytes;
    }
    if (n_rope > 0)
        put_info(&infos, ROPE_FREQS, &rope, types[GGUF_F32].number, at);
    buf_add(&start, "GGUF");
    put_u32(&start, VERSION);
    put_u64(&start, (uint64_t)(f->out.n_tensors + (n_rope > 0)));
    put_u64(&start, h.n);
    buf_add_n(&start, h.bytes.text, h.bytes.len);
    buf_add_n(&start, infos.text, infos.len);
    while (start.len % ALIGNMENT != 0 && !start.failed)
        buf_add_n(&start, "", 1);
    TRY_OUT(h.bytes.failed || infos.failed ? err_set(e, ST_NOMEM, "out of memory for a GGUF header")
                                           : buf_check(&start, e));
    TRY_OUT(file_write_fd(f->fd, start.text, start.len, f->path, e));
    for (int i = 0; st == ST_OK && i < f->out.n_tensors; i++)
        st = write_tensor(f, &f->out.tensors[i], e);
    if (st == ST_OK && n_rope > 0)
        st = file_write_fd(f->fd, divisors, (size_t)n_rope * sizeof *divisors, f->path, e);
out:
    buf_release(&h.bytes);
    buf_release(&infos);
    buf_release(&start);
    return st;
}

static int write_file(struct file *f, const struct gguf_arch *arch, const struct gguf_vocab *vocab, const char *final,
                      struct err *e)
{
    char tmp[FILE_TEMP_MAX];
    file_temp_clean(NULL, final);
    TRY(file_temp_open(final, tmp, &f->fd, e));
    f->path = tmp;
    int st = write_all(f, arch, vocab, e);
    if (st == ST_OK && fsync(f->fd) != 0)
        st = err_errno(e, "cannot write %s", f->path);
    if (close(f->fd) != 0 && st == ST_OK)
        st = err_errno(e, "cannot write %s", f->path);
    /* link, not rename: a file that appeared meanwhile is not replaced. */
    if (st == ST_OK && link(f->path, final) != 0)
        st = err_errno(e, "cannot name %s %s", f->path, final);
    unlink(f->path);
    f->path = NULL;
    return st == ST_OK ? file_sync_parent(final, e) : st;
}

int gguf_export(const struct hf_export *x, enum gguf_type type, const struct gguf_vocab *vocab, struct err *e)
{
    const struct gguf_arch *arch;
    struct file f = {.fd = -1, .type = type};
    bool exists;
    int st;
    TRY(gguf_arch_of(x->config, &arch, e));
    TRY(file_lookup(x->path, &exists, e));
    if (exists) {
        err_set(e, ST_CONFLICT, "%s exists", x->path);
        return err_hint(e, "give a file that does not exist yet");
    }
    TRY_OUT(hf_out_open(&f.out, x, &arch->family, e));
    st = write_file(&f, arch, vocab, x->path, e);
out:
    hf_out_close(&f.out);
    free(f.narrow);
    return st;
}
