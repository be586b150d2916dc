/* Which kernels run a layer kind's ops on a device, and why: lines of the table that the start of a run and `braid
 * plan` print (model/kernels.c). The reasons come from the functions that the launchers ask, so what is printed is what
 * runs. Here is what kinds share; each has its own lines in its file. */
#include "ops/attention/attention.h"
#include "ops/sparse/sparse_path.h"
#include "dev/cuda.h"
#include "layers/layer.h"

#include <string.h>

struct kernel_report kernel_report_of(const struct config *cfg, const struct dev *d, struct buf *out)
{
    const struct cuda_dev *gpu = d->kind == DEV_CUDA ? d->impl : NULL;
    struct kernel_report r = {.cfg = cfg, .dev = d, .out = out};
    r.on_paper = d->kind == DEV_CUDA && gpu == NULL;
    r.hopper = r.on_paper ? !cfg->gpu.portable : gpu != NULL && gpu->hopper;
    r.cudnn = r.on_paper || (gpu != NULL && gpu->dnn != NULL);
    return r;
}

void kernel_line(const struct kernel_report *r, const char *what, const char *kernel, const char *why)
{
    buf_addf(r->out, "  %-18s %s%s%s\n", what, kernel, why != NULL ? ": " : "", why != NULL ? why : "");
}

/* Why the library does not take it; NULL: it does. */
static const char *not_library(const struct kernel_report *r, const struct tensor *q, const struct tensor *k,
                               const struct tensor *v)
{
    const char *why = attention_not_library(q, k, v);
    if (r->cfg->model.attention_dropout > 0)
        return "cuDNN does not know braid's random numbers (model.attention_dropout)";
    if (why == NULL && config_separates(r->cfg))
        return "cuDNN takes no packed documents (data.eod_mask, data.chat)";
    return why == NULL && !r->cudnn ? "cuDNN is not installed" : why;
}

void kernel_line_attention(const struct kernel_report *r, const struct attention_sizes *a)
{
    const struct config *cfg = r->cfg;
    int64_t batch = cfg->train.micro_batch, seq = cfg->train.seq;
    enum dtype real = r->dev->real;
    if (r->dev->kind != DEV_CUDA)
        return;
    /* With parallel.cp queries are those of a part; all ranks but the first see more keys, unless blocks of them come
     * one by one. */
    int64_t part = seq / cfg->parallel.cp, keys = a->ring ? part : seq;
    struct tensor q = tensor_4d(NULL, real, batch, part, cfg->model.heads, a->width),
                  k = tensor_4d(NULL, real, batch, keys, a->keys, a->width),
                  v = tensor_4d(NULL, real, batch, keys, a->keys, a->values);
    const char *why = not_library(r, &q, &k, &v), *forward = "cuDNN", *backward = "cuDNN";
    const char *own = real == DT_BF16 && max_i64(a->width, a->values) <= 256 ? "own kernels on tensor cores"
                                                                             : "own kernels without tensor cores";
    bool library = why == NULL;
    if (!library)
        forward = backward = own;
    if (r->hopper && cfg->model.attention_dropout == 0 && attention_not_hopper(&q, &k, &v) == NULL) {
        backward = "own kernel for Hopper"; /* drops no weights */
        why = library && cfg->gpu.fast ? "gpu.fast lets it add in any order" : why;
    } else if (library && a->window > 0 && a->window < keys / 5) {
        backward = own;
        why = "cuDNN's backward goes over all keys, whatever the window";
    } else if (library && cfg->gpu.fast) {
        why = "gpu.fast lets its backward add in any order";
    }
    char text[128];
    bool same = strcmp(forward, backward) == 0;
    snprintf(text, sizeof text, "%s%s%s%s", forward, same ? "" : " forward, ", same ? "" : backward,
             same ? "" : " backward");
    kernel_line(r, a->what, text, why);
}

/* What the launchers ask, of the model's shapes. A GPU on paper is a Hopper GPU unless gpu.portable says otherwise. */
static struct sparse_device sparse_device_of(const struct kernel_report *r)
{
    const struct cuda_dev *gpu = r->on_paper ? NULL : r->dev->impl;
    struct sparse_device d = sparse_some_hopper;
    d.hopper = r->hopper;
    if (gpu != NULL)
        d.smem_per_block = gpu->smem_per_block;
    return d;
}

void kernel_lines_sparse(const struct kernel_report *r, const struct sparse_sizes *s)
{
    if (r->dev->kind != DEV_CUDA)
        return;
    struct sparse_device d = sparse_device_of(r);
    struct sparse_shape keys = {r->dev->real, r->cfg->model.heads, s->width, s->values,
                                s->width % 8 == 0 && s->values % 8 == 0};
    struct sparse_choice attention = sparse_path_of(&keys, &d);
    kernel_line(r, s->what, attention.kernels, attention.why);
    if (s->index_heads == 0)
        return;
    struct index_shape index = {r->dev->real, s->index_heads, s->index_dim, s->index_dim % 8 == 0, false};
    struct sparse_choice scores = index_path_of(&index, &d);
    kernel_line(r, "indexer scores", scores.kernels, scores.why);
}
