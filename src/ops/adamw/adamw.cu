/* adamw, CUDA version; see adamw.h. One kernel updates dozens of parameters: their addresses travel as its argument, so
 * neither a table in device memory nor a launch for each is needed. Blocks of BLOCK elements, distributed over the
 * parameters in order. Matrices with FP8 codes have a kernel of their own (adamw_codes.cu). */
#include "ops/adamw/adamw.cuh"
#include "ops/adamw/adamw_int.h"

enum { PARTS = 64, BLOCK = 4096 }; /* parameters and elements a launch and a block take */

struct part {
    float *p, *m, *v;
    const float *g;
    void *copy;
    int64_t n;
    float decay, rate;
    uint32_t first_block;
};
struct adamw_call {
    struct part part[PARTS];
    int parts;
    struct adamw_common common;
};

template <typename T>
__device__ __forceinline__ void update_vector(const struct rates &r, const struct part &at, int64_t i)
{
    float g[4], p[4], m[4], v[4];
    load_floats(at.g + i, g);
    load_floats(at.p + i, p);
    load_floats(at.m + i, m);
    load_floats(at.v + i, v);
#pragma unroll
    for (int e = 0; e < 4; e++)
        update(r, g[e], &p[e], &m[e], &v[e]);
    store_floats(at.p + i, p);
    store_floats(at.m + i, m);
    store_floats(at.v + i, v);
    if (at.copy != NULL)
        store_floats((T *)at.copy + i, p);
}

template <typename T>
static __global__ void __launch_bounds__(256) adamw_parts(const __grid_constant__ struct adamw_call a)
{
    if (a.common.scale[2] != 0)
        return;
    const struct part &at = a.part[part_of_block(a.part, a.parts, blockIdx.x)];
    struct rates r = rates_of(a.common, at.rate, at.decay);
    int64_t first = (int64_t)(blockIdx.x - at.first_block) * BLOCK, end = min(at.n, first + BLOCK);
    bool vectors =
        ((uintptr_t)at.p | (uintptr_t)at.g | (uintptr_t)at.m | (uintptr_t)at.v | (uintptr_t)at.copy) % 16 == 0;
    int64_t whole = vectors ? end - (end - first) % 4 : first;
    for (int64_t i = first + threadIdx.x * 4; i < whole; i += 256 * 4)
        update_vector<T>(r, at, i);
    for (int64_t i = whole + threadIdx.x; i < end; i += 256) {
        float p = at.p[i], m = at.m[i], v = at.v[i];
        update(r, at.g[i], &p, &m, &v);
        at.p[i] = p;
        at.m[i] = m;
        at.v[i] = v;
        if (at.copy != NULL)
            ((T *)at.copy)[i] = from_float<T>(p);
    }
}

/* Copies of another type than the first parameter's cannot be: absent ones fit any. */
static int one_copy_type(const struct adamw_args *a, enum dtype *type, struct err *e)
{
    *type = DT_NONE;
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        if (!present(&p.copy))
            continue;
        if (*type != DT_NONE && *type != p.copy.dtype)
            return err_set(e, ST_INVALID, "adamw: working copies of one call must have one type");
        *type = p.copy.dtype;
    }
    return ST_OK;
}

static int launch(struct lane *l, const struct adamw_call *c, uint32_t blocks, enum dtype copy)
{
    if (copy == DT_BF16)
        LAUNCH(l, adamw_parts<bf16>, blocks, 256, 0, *c);
    else
        LAUNCH(l, adamw_parts<float>, blocks, 256, 0, *c);
    return ST_OK;
}

/* Codes of parts that do not fit tiles. */
static int plain_codes(struct lane *l, const struct adamw_args *a)
{
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        struct quantise_args codes = adamw_quantise(&p);
        if (present(&p.q) && !adamw_in_tiles(&p))
            TRY(quantise_cuda(l, &codes));
    }
    return ST_OK;
}

extern "C" int adamw_cuda(struct lane *l, const struct adamw_args *a)
{
    enum dtype copy;
    TRY(adamw_check(a, l->err));
    TRY(one_copy_type(a, &copy, l->err));
    struct adamw_call c = {};
    c.common.hyper = (const double *)a->hyper.data;
    c.common.scale = (const double *)a->scale.data;
    c.common.beta1 = (float)a->beta1;
    c.common.beta2 = (float)a->beta2;
    c.common.rest1 = (float)(1 - a->beta1);
    c.common.rest2 = (float)(1 - a->beta2);
    c.common.eps = (float)a->eps;
    TRY(adamw_coded(l, a, &c.common));
    int64_t blocks = 0;
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        if (p.p.dim[0] == 0 || adamw_in_tiles(&p))
            continue;
        struct part *to = &c.part[c.parts++];
        to->p = (float *)p.p.data;
        to->m = (float *)p.m.data;
        to->v = (float *)p.v.data;
        to->g = (const float *)p.g.data;
        to->copy = p.copy.data;
        to->n = p.p.dim[0];
        to->decay = (float)p.decay;
        to->rate = (float)p.rate;
        to->first_block = (uint32_t)blocks;
        blocks += ceil_div(to->n, BLOCK);
        if (blocks > INT32_MAX)
            return err_set(l->err, ST_UNSUPPORTED, "adamw: a parameter of %lld elements is more than one launch takes",
                           (long long)to->n);
        if (c.parts == PARTS || blocks > INT32_MAX / 2) {
            TRY(launch(l, &c, (uint32_t)blocks, copy));
            c.parts = 0;
            blocks = 0;
        }
    }
    if (c.parts > 0)
        TRY(launch(l, &c, (uint32_t)blocks, copy));
    return plain_codes(l, a);
}
