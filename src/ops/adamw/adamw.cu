/* adamw, CUDA version; see adamw.h. One kernel updates dozens of parameters: their addresses travel as its argument, so
 * neither a table in device memory nor a launch for each is needed. Blocks of BLOCK elements, distributed over the
 * parameters in order. Matrices with FP8 codes have a kernel of their own (adamw_codes.cu). */
#include "ops/adamw/adamw.cuh"
#include "ops/adamw/adamw_int.h"

/* Parameters that a launch takes, and with places (moments that are rounded); elements of a block. */
enum { PARTS = 64, PLACED = 32, BLOCK = 4096 };

struct part {
    float *p;
    void *m, *v; /* float, or bf16 */
    const float *g;
    void *copy;
    int64_t n;
    float decay, rate;
    uint32_t first_block;
};
template <int N> struct adamw_call {
    struct part part[N];
    struct adamw_place at[N == PLACED ? N : 1];
    int parts;
    struct adamw_common common;
};

/* Draws of V elements from i on, in a part that is rounded. */
template <int V>
__device__ __forceinline__ void draw_elems(const struct adamw_place &at, double update, int64_t i, uint32_t (&out)[V])
{
    int64_t place = adamw_place_of(&at, i);
    if (V == 4 && place % 4 == 0 && (at.row == 0 || adamw_place_of(&at, i + 3) == place + 3)) {
        struct philox4 r = adamw_draws(at.key, place / 4, update);
#pragma unroll
        for (int e = 0; e < V; e++)
            out[e] = r.v[e];
        return;
    }
#pragma unroll
    for (int e = 0; e < V; e++) {
        place = adamw_place_of(&at, i + e);
        struct philox4 r = adamw_draws(at.key, place / 4, update);
        int k = (int)(place % 4);
        out[e] = k == 0 ? r.v[0] : k == 1 ? r.v[1] : k == 2 ? r.v[2] : r.v[3]; /* an index would need memory */
    }
}

__device__ __forceinline__ float rounded(float x, uint32_t draw)
{
    return __uint_as_float((uint32_t)adamw_round(x, draw) << 16);
}

/* V elements from i on; T: of the copy, M: of the moments; place: NULL where nothing is rounded. */
template <typename T, typename M, int V>
__device__ __forceinline__ void update_elems(const struct rates &r, const struct part &at,
                                             const struct adamw_place *place, double number, int64_t i)
{
    float g[V], p[V], m[V], v[V];
    load_floats(at.g + i, g);
    load_floats(at.p + i, p);
    load_floats((const M *)at.m + i, m);
    load_floats((const M *)at.v + i, v);
#pragma unroll
    for (int e = 0; e < V; e++)
        update(r, g[e], &p[e], &m[e], &v[e]);
    if (place != NULL) {
        uint32_t draw[V];
        draw_elems(*place, number, i, draw);
#pragma unroll
        for (int e = 0; e < V; e++) {
            m[e] = rounded(m[e], draw[e]);
            v[e] = rounded(v[e], draw[e] >> 16);
        }
    }
    store_floats(at.p + i, p);
    store_floats((M *)at.m + i, m);
    store_floats((M *)at.v + i, v);
    if (at.copy != NULL)
        store_floats((T *)at.copy + i, p);
}

template <typename T, typename M, int N>
static __global__ void __launch_bounds__(256) adamw_parts(const __grid_constant__ struct adamw_call<N> a)
{
    if (a.common.scale[2] != 0)
        return;
    int k = part_of_block(a.part, a.parts, blockIdx.x);
    const struct part &at = a.part[k];
    struct rates r = rates_of(a.common, at.rate, at.decay);
    const struct adamw_place *place = N == PLACED ? &a.at[k] : NULL;
    double number = N == PLACED ? a.common.hyper[3] : 0;
    int64_t first = (int64_t)(blockIdx.x - at.first_block) * BLOCK, end = min(at.n, first + BLOCK);
    bool vectors =
        ((uintptr_t)at.p | (uintptr_t)at.g | (uintptr_t)at.m | (uintptr_t)at.v | (uintptr_t)at.copy) % 16 == 0;
    int64_t whole = vectors ? end - (end - first) % 4 : first;
    for (int64_t i = first + threadIdx.x * 4; i < whole; i += 256 * 4)
        update_elems<T, M, 4>(r, at, place, number, i);
    for (int64_t i = whole + threadIdx.x; i < end; i += 256)
        update_elems<T, M, 1>(r, at, place, number, i);
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

template <int N>
static int launch(struct lane *l, const struct adamw_call<N> *c, uint32_t blocks, enum dtype copy, enum dtype state)
{
    if constexpr (N == PLACED) {
        if (state == DT_BF16 && copy == DT_BF16)
            LAUNCH(l, (adamw_parts<bf16, bf16, N>), blocks, 256, 0, *c);
        else if (state == DT_BF16)
            LAUNCH(l, (adamw_parts<float, bf16, N>), blocks, 256, 0, *c);
        if (state == DT_BF16)
            return ST_OK;
    }
    if (copy == DT_BF16)
        LAUNCH(l, (adamw_parts<bf16, float, N>), blocks, 256, 0, *c);
    else
        LAUNCH(l, (adamw_parts<float, float, N>), blocks, 256, 0, *c);
    return ST_OK;
}

/* Are codes of this part made by adamw_coded? Not beside moments that are rounded. */
static bool in_tiles(const struct adamw_args *a, const struct adamw_part *p) { return !a->bf16 && adamw_in_tiles(p); }

/* Codes of parts that do not fit tiles. */
static int plain_codes(struct lane *l, const struct adamw_args *a)
{
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        struct quantise_args codes = adamw_quantise(&p);
        if (present(&p.q) && !in_tiles(a, &p))
            TRY(quantise_cuda(l, &codes));
    }
    return ST_OK;
}

template <int N>
static int update_all(struct lane *l, const struct adamw_args *a, const struct adamw_common *common, enum dtype copy)
{
    adamw_call<N> c = {};
    c.common = *common;
    int64_t blocks = 0;
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        if (p.p.dim[0] == 0 || in_tiles(a, &p))
            continue;
        if (N == PLACED)
            c.at[c.parts] = p.at;
        struct part *to = &c.part[c.parts++];
        to->p = (float *)p.p.data;
        to->m = p.m.data;
        to->v = p.v.data;
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
        if (c.parts == N || blocks > INT32_MAX / 2) {
            TRY(launch<N>(l, &c, (uint32_t)blocks, copy, a->m.dtype));
            c.parts = 0;
            blocks = 0;
        }
    }
    if (c.parts > 0)
        TRY(launch<N>(l, &c, (uint32_t)blocks, copy, a->m.dtype));
    return plain_codes(l, a);
}

extern "C" int adamw_cuda(struct lane *l, const struct adamw_args *a)
{
    enum dtype copy;
    TRY(adamw_check(a, l->err));
    TRY(one_copy_type(a, &copy, l->err));
    struct adamw_common common = {};
    common.hyper = (const double *)a->hyper.data;
    common.scale = (const double *)a->scale.data;
    common.beta1 = (float)a->beta1;
    common.beta2 = (float)a->beta2;
    common.rest1 = (float)(1 - a->beta1);
    common.rest2 = (float)(1 - a->beta2);
    common.eps = (float)a->eps;
    if (a->bf16)
        return update_all<PLACED>(l, a, &common, copy);
    TRY(adamw_coded(l, a, &common));
    return update_all<PARTS>(l, a, &common, copy);
}
