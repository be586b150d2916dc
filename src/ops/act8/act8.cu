/* act8 on the GPU; see act8.h. Tiles of 128 rows and 128 columns of y: a thread makes eight columns of eight rows,
 * rounds them as they would be stored, and hands them to the quantiser of ops/cuda/f8.cuh. Backward, a block makes the
 * tiles of gate and up one after the other. Other shapes take act and quantise by way of scratch. */
#include "ops/act/act.cuh"
#include "ops/act8/act8_int.h"
#include "ops/cuda/f8.cuh"

/* By shapes alone, so that scratch can be planned; addresses of slots are aligned. */
static bool in_tiles(const struct tensor *x, const struct tensor *dy, const struct tensor *t, const struct act_rule *r,
                     int64_t block)
{
    int64_t rows = x->dim[0], f = x->dim[1] / act_gate(r->kind), align = 16 / (int64_t)dtype_bytes(x->dtype);
    bool aligned = (rows <= 1 || x->stride[0] % align == 0) && (dy == NULL || rows <= 1 || dy->stride[0] % align == 0);
    return block == F8_TILE && f > 0 && rows > 0 && f % F8_TILE == 0 &&
           (act_gate(r->kind) == 1 || r->interleave == 0) && aligned && (t->rank == 0 || rows % 16 == 0) &&
           rows <= 65535ll * F8_TILE;
}

/* The thread's eight rows, four at a time so that their loads are under way together. Forward tile holds y; backward
 * the gradient of gate, and up that of up. */
template <typename T, int CURVE, bool GATED, bool BACK, bool CLAMPED>
__device__ __forceinline__ void make_tile(const struct act_call &a, int64_t r0, int64_t c0, int valid,
                                          f8_eight<T> *tile, f8_eight<T> *tile_up)
{
    f8_walk<T> x(a.x.data, a.x.stride[0], r0, c0, valid),
        dy(BACK ? a.dy.data : a.x.data, BACK ? a.dy.stride[0] : 0, r0, c0, valid);
#pragma unroll
    for (int i0 = 0; i0 < 8; i0 += 4) {
        f8_eight<T> gates[4], ups[4], above[4];
#pragma unroll
        for (int i = 0; i < 4; i++, x.next(), dy.next()) {
            gates[i] = x.load();
            if (GATED)
                ups[i] = x.load(a.f);
            if (BACK)
                above[i] = dy.load();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float gate[8], up[8] = {}, d[8];
            f8_floats(gates[i], gate);
            if (GATED)
                f8_floats(ups[i], up);
            if (BACK)
                f8_floats(above[i], d);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float d_gate, d_up, y = one_value<CURVE, GATED, CLAMPED>(a, gate[e], up[e], &d_gate, &d_up);
                gate[e] = BACK ? d[e] * d_gate : y;
                up[e] = BACK ? d[e] * d_up : 0.0f;
            }
            tile[i0 + i] = f8_stored<T>(gate);
            if (BACK && GATED)
                tile_up[i0 + i] = f8_stored<T>(up);
        }
    }
}

template <typename T, enum dtype TYPE, int CURVE, bool GATED, bool BACK>
static __global__ void __launch_bounds__(F8_THREADS, sizeof(T) == 4 ? 1
                                                     : BACK         ? 2
                                                                    : 3)
    act8_tiles(const __grid_constant__ struct act_call a, const __grid_constant__ struct f8_out o)
{
    __shared__ struct f8_shared s;
    int64_t r0 = (int64_t)blockIdx.y * F8_TILE, c0 = (int64_t)blockIdx.x * F8_TILE;
    int valid = f8_valid(o, r0, c0);
    f8_eight<T> tile[8], tile_up[8];
    if (a.limit < INFINITY)
        make_tile<T, CURVE, GATED, BACK, true>(a, r0, c0, valid, tile, tile_up);
    else
        make_tile<T, CURVE, GATED, BACK, false>(a, r0, c0, valid, tile, tile_up);
    f8_clear(tile, valid);
    f8_quantise_tile<T, TYPE, F8_ROWS>(tile, o, r0, c0, 0, &s);
    if (BACK && GATED) {
        f8_clear(tile_up, valid);
        __syncthreads(); /* the tile before is read out of shared memory */
        f8_quantise_tile<T, TYPE, F8_ROWS>(tile_up, o, r0, a.f + c0, 0, &s);
    }
}

template <typename T, enum dtype TYPE, int CURVE, bool GATED>
static int launch(struct lane *l, const struct act_call *a, const struct f8_out *o)
{
    dim3 grid((unsigned)(a->f / F8_TILE), (unsigned)ceil_div(a->rows, F8_TILE));
    if (a->dy.data != NULL)
        LAUNCH(l, (act8_tiles<T, TYPE, CURVE, GATED, true>), grid, F8_THREADS, 0, *a, *o);
    else
        LAUNCH(l, (act8_tiles<T, TYPE, CURVE, GATED, false>), grid, F8_THREADS, 0, *a, *o);
    return ST_OK;
}

template <typename T, enum dtype TYPE>
static int by_kind(struct lane *l, const struct act_call *a, const struct f8_out *o, enum act_kind kind)
{
    switch (kind) {
    case ACT_SWIGLU:
    case ACT_QUICK_GEGLU: return launch<T, TYPE, CURVE_SIGMOID, true>(l, a, o);
    case ACT_GEGLU: return launch<T, TYPE, CURVE_GELU, true>(l, a, o);
    case ACT_GELU: return launch<T, TYPE, CURVE_GELU, false>(l, a, o);
    case ACT_RELU2: return launch<T, TYPE, CURVE_SQUARE, false>(l, a, o);
    default: return launch<T, TYPE, CURVE_SIGMOID, false>(l, a, o);
    }
}

/* dy absent: forward. */
static int tiles(struct lane *l, const struct tensor *x, const struct tensor *dy, const struct f8_out *o,
                 const struct act_rule *r, enum dtype type)
{
    struct act_call c = {};
    c.x = *x;
    c.dy = *dy;
    c.rows = x->dim[0];
    c.f = x->dim[1] / act_gate(r->kind);
    act_numbers(&c, r);
    bool aligned = pointer16(x->data) && pointer16(dy->data) && pointer16(o->q) && pointer16(o->t);
    if (!aligned)
        return err_set(l->err, ST_UNSUPPORTED, "act8: tensors that do not begin at multiples of 16 bytes");
    BY_REAL(x->dtype, T,
            return type == DT_F8_E5M2 ? by_kind<T, DT_F8_E5M2>(l, &c, o, r->kind)
                                      : by_kind<T, DT_F8_E4M3>(l, &c, o, r->kind));
}

static int64_t work_bytes(const struct tensor *x, int64_t cols, int64_t block)
{
    struct quantise_args q = {};
    q.block = block;
    return act8_values_bytes(x, cols) + quantise_work_cuda(&q);
}

extern "C" int64_t act8_fwd_work_cuda(const struct act8_fwd_args *a)
{
    return in_tiles(&a->x, NULL, &a->t, &a->rule, a->block)
               ? 0
               : work_bytes(&a->x, a->x.dim[1] / act_gate(a->rule.kind), a->block);
}
extern "C" int64_t act8_bwd_work_cuda(const struct act8_bwd_args *a)
{
    return in_tiles(&a->x, &a->dy, &a->t, &a->rule, a->block) ? 0 : work_bytes(&a->x, a->x.dim[1], a->block);
}

/* The second half of the plain path. */
template <typename A> static int quantise_values(struct lane *l, const A *a, const struct tensor *values)
{
    struct quantise_args q = {};
    int64_t bytes = act8_values_bytes(&a->x, values->dim[1]);
    q.x = *values;
    q.q = a->q;
    q.qs = a->qs;
    q.t = a->t;
    q.ts = a->ts;
    q.block = a->block;
    if (quantise_work_cuda(&q) > 0)
        q.work = tensor_1d((char *)a->work.data + bytes, DT_U8, quantise_work_cuda(&q));
    return quantise_cuda(l, &q);
}

extern "C" int act8_fwd_cuda(struct lane *l, const struct act8_fwd_args *a)
{
    TRY(act8_fwd_check(a, l->err));
    TRY(check_work("act8_fwd", &a->work, act8_fwd_work_cuda(a), l->err));
    int64_t cols = a->x.dim[1] / act_gate(a->rule.kind);
    struct tensor none = {};
    if (in_tiles(&a->x, NULL, &a->t, &a->rule, a->block)) {
        struct f8_out o = f8_out_of(&a->q, &a->qs, &a->t, &a->ts, a->x.dim[0], cols, a->block, false);
        return tiles(l, &a->x, &none, &o, &a->rule, present(&a->q) ? a->q.dtype : a->t.dtype);
    }
    struct act_fwd_args f = {};
    f.x = a->x;
    f.y = act8_values(&a->x, cols, a->work.data != NULL ? a->work.data : a->x.data);
    f.rule = a->rule;
    TRY(act_fwd_cuda(l, &f));
    return quantise_values(l, a, &f.y);
}

extern "C" int act8_bwd_cuda(struct lane *l, const struct act8_bwd_args *a)
{
    TRY(act8_bwd_check(a, l->err));
    TRY(check_work("act8_bwd", &a->work, act8_bwd_work_cuda(a), l->err));
    if (in_tiles(&a->x, &a->dy, &a->t, &a->rule, a->block)) {
        struct f8_out o = f8_out_of(&a->q, &a->qs, &a->t, &a->ts, a->x.dim[0], a->x.dim[1], a->block, false);
        return tiles(l, &a->x, &a->dy, &o, &a->rule, present(&a->q) ? a->q.dtype : a->t.dtype);
    }
    struct act_bwd_args b = {};
    b.dy = a->dy;
    b.x = a->x;
    b.dx = act8_values(&a->x, a->x.dim[1], a->work.data != NULL ? a->work.data : a->x.data);
    b.rule = a->rule;
    TRY(act_bwd_cuda(l, &b));
    return quantise_values(l, a, &b.dx);
}
