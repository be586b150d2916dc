/* Causal attention as a graph of primitive operations, forward and backward; see cudnn_int.h.
 *
 * The library recognises the pattern and runs one fused kernel for it, so the nodes, their order and the types of the
 * tensors between them are fixed: a graph that computes the same by other nodes may be refused or run slowly.
 *   forward   s = q k^T * scale; masked; m = max s; p = exp(s - m) / sum; o = p v; lse = m + log sum
 *   backward  rowsum = sum(do * o); p = exp(s - lse); dv = p^T do; ds = p * (do v^T - rowsum) * scale;
 *             dk = ds^T q; dq = ds k
 * With grouped heads dk and dv are made for every query head and a last node adds the heads of a group. In the
 * deterministic graph ds k is written to dq at once, which makes the library keep all of ds; in the other one it is
 * added up in an fp32 tensor of ours in the order in which thread blocks happen to finish. */
#include "dev/cudnn_int.h"

#ifdef BRAID_CUDNN

typedef cudnnBackendDescriptor_t desc;

/* ---- descriptors ----------------------------------------------------------------------------- */

desc sdpa_new(struct sdpa_graph *g, cudnnBackendDescriptorType_t type)
{
    desc d = NULL;
    if (g->status != ST_OK)
        return NULL;
    if (g->n == SDPA_MAX_DESCRIPTORS) {
        g->status = err_set(g->e, ST_INTERNAL, "cuDNN graph: more than %d descriptors", SDPA_MAX_DESCRIPTORS);
        return NULL;
    }
    g->status = dnn_status(g->lib, g->lib->new_descriptor(type, &d), "cudnnBackendCreateDescriptor", g->e);
    if (g->status == ST_OK)
        g->made[g->n++] = d;
    return d;
}

void sdpa_set(struct sdpa_graph *g, desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
              int64_t n, const void *value)
{
    if (g->status != ST_OK)
        return;
    char what[64];
    snprintf(what, sizeof what, "cudnnBackendSetAttribute(%d)", (int)name);
    g->status = dnn_status(g->lib, g->lib->set(d, name, type, n, value), what, g->e);
}

void sdpa_finalize(struct sdpa_graph *g, desc d)
{
    if (g->status == ST_OK)
        g->status = dnn_status(g->lib, g->lib->finalize(d), "cudnnBackendFinalize", g->e);
}

static void set_desc(struct sdpa_graph *g, desc d, cudnnBackendAttributeName_t name, desc value)
{
    sdpa_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(struct sdpa_graph *g, desc d, cudnnBackendAttributeName_t name, cudnnDataType_t value)
{
    sdpa_set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

/* ---- tensors --------------------------------------------------------------------------------- */

struct shape4 {
    int64_t dim[4], stride[4];
};

static struct shape4 dense4(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (struct shape4){{a, b, c, d}, {b * c * d, c * d, d, 1}};
}

/* Batch, head, row, channel, as the library wants them, of a tensor that lies in memory as said. */
static struct shape4 heads4(int64_t batch, int64_t heads, int64_t rows, int64_t width, const struct sdpa_stride *s)
{
    return (struct shape4){{batch, heads, rows, width}, {s->batch, s->head, s->row, 1}};
}

static struct shape4 transposed(struct shape4 s)
{
    return (struct shape4){{s.dim[0], s.dim[1], s.dim[3], s.dim[2]},
                           {s.stride[0], s.stride[1], s.stride[3], s.stride[2]}};
}

static desc tensor_desc(struct sdpa_graph *g, int64_t uid, cudnnDataType_t type, const struct shape4 *s,
                        bool is_virtual, bool by_value)
{
    desc d = sdpa_new(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16;
    set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, s->dim);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, s->stride);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    sdpa_set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    sdpa_finalize(g, d);
    return d;
}

static desc bound(struct sdpa_graph *g, enum sdpa_uid uid, cudnnDataType_t type, struct shape4 s)
{
    return tensor_desc(g, uid, type, &s, false, false);
}

static desc between(struct sdpa_graph *g, cudnnDataType_t type, struct shape4 s)
{
    return tensor_desc(g, g->next_uid++, type, &s, true, false);
}

static desc scalar(struct sdpa_graph *g, enum sdpa_uid uid)
{
    struct shape4 one = {{1, 1, 1, 1}, {1, 1, 1, 1}};
    return tensor_desc(g, uid, CUDNN_DATA_FLOAT, &one, false, true);
}

/* ---- operations ------------------------------------------------------------------------------ */

static void add_op(struct sdpa_graph *g, desc op)
{
    sdpa_finalize(g, op);
    if (g->status == ST_OK && g->n_ops == SDPA_MAX_OPS)
        g->status = err_set(g->e, ST_INTERNAL, "cuDNN graph: more than %d operations", SDPA_MAX_OPS);
    if (g->status == ST_OK)
        g->op[g->n_ops++] = op;
}

static void matmul(struct sdpa_graph *g, desc a, desc b, desc c)
{
    desc m = sdpa_new(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(g, m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    sdpa_finalize(g, m);
    desc op = sdpa_new(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, m);
    add_op(g, op);
}

static desc pointwise_mode(struct sdpa_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t precision, int64_t axis)
{
    desc m = sdpa_new(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    sdpa_set(g, m, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(g, m, CUDNN_ATTR_POINTWISE_MATH_PREC, precision);
    if (axis >= 0)
        sdpa_set(g, m, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    sdpa_finalize(g, m);
    return m;
}

/* y = mode(x, b), or mode(x, b, t); b and t may be NULL. */
static void pointwise_op(struct sdpa_graph *g, desc mode, desc x, desc b, desc t, desc y)
{
    desc op = sdpa_new(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, mode);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b != NULL)
        set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t != NULL)
        set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, op);
}

static void pointwise_to(struct sdpa_graph *g, cudnnPointwiseMode_t mode, desc x, desc b, desc y)
{
    pointwise_op(g, pointwise_mode(g, mode, CUDNN_DATA_FLOAT, -1), x, b, NULL, y);
}

/* Into a new tensor of this shape that stays on chip. */
static desc pointwise(struct sdpa_graph *g, cudnnPointwiseMode_t mode, desc x, desc b, struct shape4 s)
{
    desc y = between(g, CUDNN_DATA_FLOAT, s);
    pointwise_to(g, mode, x, b, y);
    return y;
}

static void reduce_to(struct sdpa_graph *g, cudnnReduceTensorOp_t how, desc x, desc y)
{
    desc m = sdpa_new(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    sdpa_set(g, m, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set_type(g, m, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    sdpa_finalize(g, m);
    desc op = sdpa_new(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, m);
    add_op(g, op);
}

static desc reduce(struct sdpa_graph *g, cudnnReduceTensorOp_t how, desc x, struct shape4 s)
{
    desc y = between(g, CUDNN_DATA_FLOAT, s);
    reduce_to(g, how, x, y);
    return y;
}

/* The same elements under other strides, in bf16: how a product reads its operand transposed. */
static desc reshape(struct sdpa_graph *g, desc x, struct shape4 s)
{
    desc y = between(g, CUDNN_DATA_BFLOAT16, s);
    desc op = sdpa_new(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_op(g, op);
    return y;
}

/* x where a >= b (or a > b), else minus infinity. */
static desc keep_where(struct sdpa_graph *g, desc x, cudnnPointwiseMode_t order, desc a, desc b, desc neg_inf,
                       struct shape4 s)
{
    desc seen = between(g, CUDNN_DATA_BOOLEAN, s), y = between(g, CUDNN_DATA_FLOAT, s);
    pointwise_op(g, pointwise_mode(g, order, CUDNN_DATA_BOOLEAN, -1), a, b, NULL, seen);
    pointwise_op(g, pointwise_mode(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, -1), x, neg_inf, seen, y);
    return y;
}

static desc index_of(struct sdpa_graph *g, desc x, int64_t axis, struct shape4 s)
{
    desc y = between(g, CUDNN_DATA_INT32, s);
    pointwise_op(g, pointwise_mode(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, axis), x, NULL, NULL, y);
    return y;
}

/* Keys up to the row, and with a window only the last ones: row >= column, column + window > row. */
static desc causal_mask(struct sdpa_graph *g, const struct sdpa_key *k, desc x, struct shape4 s)
{
    desc neg_inf = scalar(g, UID_NEG_INF);
    desc row = index_of(g, x, 2, s), col = index_of(g, x, 3, s);
    x = keep_where(g, x, CUDNN_POINTWISE_CMP_GE, row, col, neg_inf, s);
    if (!k->windowed)
        return x;
    row = index_of(g, x, 2, s);
    col = index_of(g, x, 3, s);
    desc end = between(g, CUDNN_DATA_FLOAT, s);
    pointwise_op(g, pointwise_mode(g, CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, -1), col, scalar(g, UID_WINDOW), NULL,
                 end);
    return keep_where(g, x, CUDNN_POINTWISE_CMP_GT, end, row, neg_inf, s);
}

/* ---- the two graphs -------------------------------------------------------------------------- */

static struct shape4 lse_shape(const struct sdpa_key *k)
{
    return (struct shape4){{k->batch, k->heads, k->seq, 1}, {k->lse_batch, k->lse_head, 1, 1}};
}

static void build_forward(struct sdpa_graph *g, const struct sdpa_key *k)
{
    int64_t b = k->batch, h = k->heads, n = k->seq;
    struct shape4 scores = dense4(b, h, n, n), rows = dense4(b, h, n, 1);
    desc q = bound(g, UID_Q, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d, &k->q));
    desc kt = bound(g, UID_K, CUDNN_DATA_BFLOAT16, transposed(heads4(b, k->kv_heads, n, k->d, &k->k)));
    desc v = bound(g, UID_V, CUDNN_DATA_BFLOAT16, heads4(b, k->kv_heads, n, k->d_v, &k->v));
    desc o = bound(g, UID_O, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d_v, &k->o));
    desc lse = bound(g, UID_LSE, CUDNN_DATA_FLOAT, lse_shape(k));
    desc s = between(g, CUDNN_DATA_FLOAT, scores), p = between(g, CUDNN_DATA_BFLOAT16, scores);
    matmul(g, q, kt, s);
    s = pointwise(g, CUDNN_POINTWISE_MUL, s, scalar(g, UID_SCALE), scores);
    s = causal_mask(g, k, s, scores);
    desc max = reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, rows);
    s = pointwise(g, CUDNN_POINTWISE_SUB, s, max, scores);
    s = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, scores);
    desc sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, s, rows);
    desc log = pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, rows);
    pointwise_to(g, CUDNN_POINTWISE_ADD, max, log, lse);
    pointwise_to(g, CUDNN_POINTWISE_DIV, s, sum, p);
    matmul(g, p, v, o);
}

/* out = a b; where query heads share kv heads, for every query head first, then added up over those of a group. */
static void matmul_by_group(struct sdpa_graph *g, const struct sdpa_key *k, desc a, desc b, int64_t width, desc out)
{
    if (k->heads == k->kv_heads) {
        matmul(g, a, b, out);
        return;
    }
    desc full = between(g, CUDNN_DATA_BFLOAT16, dense4(k->batch, k->heads, k->seq, width));
    matmul(g, a, b, full);
    reduce_to(g, CUDNN_REDUCE_TENSOR_ADD, full, out);
}

static desc build_rowsum(struct sdpa_graph *g, const struct sdpa_key *k, desc dout)
{
    int64_t b = k->batch, h = k->heads, n = k->seq;
    struct shape4 rows = dense4(b, h, n, 1);
    desc o = bound(g, UID_O, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d_v, &k->o));
    desc x = pointwise(g, CUDNN_POINTWISE_MUL, dout, o, dense4(b, h, n, k->d_v));
    x = reduce(g, CUDNN_REDUCE_TENSOR_ADD, x, rows);
    desc rowsum = bound(g, UID_ROWSUM, CUDNN_DATA_FLOAT, rows);
    pointwise_to(g, CUDNN_POINTWISE_MUL, x, scalar(g, UID_ONE), rowsum);
    return rowsum;
}

static void build_dq(struct sdpa_graph *g, const struct sdpa_key *k, desc ds, desc kt)
{
    int64_t b = k->batch, h = k->heads, n = k->seq;
    desc dq = bound(g, UID_DQ, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d, &k->dq));
    desc keys = reshape(g, kt, heads4(b, k->kv_heads, n, k->d, &k->k));
    if (k->deterministic) {
        matmul(g, ds, keys, dq);
        return;
    }
    desc sum = bound(g, UID_DQ_SUM, CUDNN_DATA_FLOAT, dense4(b, h, n, k->d));
    matmul(g, ds, keys, sum);
    pointwise_to(g, CUDNN_POINTWISE_IDENTITY, sum, NULL, dq);
}

static void build_backward(struct sdpa_graph *g, const struct sdpa_key *k)
{
    int64_t b = k->batch, h = k->heads, n = k->seq;
    struct shape4 scores = dense4(b, h, n, n);
    struct shape4 flipped = {{b, h, n, n}, {h * n * n, n * n, 1, n}};
    desc q = bound(g, UID_Q, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d, &k->q));
    desc kt = bound(g, UID_K, CUDNN_DATA_BFLOAT16, transposed(heads4(b, k->kv_heads, n, k->d, &k->k)));
    desc vt = bound(g, UID_V, CUDNN_DATA_BFLOAT16, transposed(heads4(b, k->kv_heads, n, k->d_v, &k->v)));
    desc dout = bound(g, UID_DO, CUDNN_DATA_BFLOAT16, heads4(b, h, n, k->d_v, &k->dout));
    desc lse = bound(g, UID_LSE, CUDNN_DATA_FLOAT, lse_shape(k));
    desc dk = bound(g, UID_DK, CUDNN_DATA_BFLOAT16, heads4(b, k->kv_heads, n, k->d, &k->dk));
    desc dv = bound(g, UID_DV, CUDNN_DATA_BFLOAT16, heads4(b, k->kv_heads, n, k->d_v, &k->dv));
    desc scale = scalar(g, UID_SCALE);
    desc rowsum = build_rowsum(g, k, dout);

    desc s = between(g, CUDNN_DATA_FLOAT, scores);
    matmul(g, q, kt, s);
    s = pointwise(g, CUDNN_POINTWISE_MUL, s, scale, scores);
    s = pointwise(g, CUDNN_POINTWISE_SUB, s, lse, scores);
    s = causal_mask(g, k, s, scores);
    desc p = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, scores);
    matmul_by_group(g, k, reshape(g, p, flipped), dout, k->d_v, dv);

    desc dp = between(g, CUDNN_DATA_FLOAT, scores);
    matmul(g, dout, vt, dp);
    dp = pointwise(g, CUDNN_POINTWISE_SUB, dp, rowsum, scores);
    dp = pointwise(g, CUDNN_POINTWISE_MUL, dp, p, scores);
    desc ds = pointwise(g, CUDNN_POINTWISE_MUL, dp, scale, scores);
    matmul_by_group(g, k, reshape(g, ds, flipped), q, k->d, dk);
    build_dq(g, k, ds, kt);
}

int sdpa_graph_build(struct sdpa_graph *g, const struct dnn_lib *lib, const struct sdpa_key *k, cudnnHandle_t handle,
                     struct err *e)
{
    *g = (struct sdpa_graph){.lib = lib, .e = e, .next_uid = UID_VIRTUAL};
    if (k->backward)
        build_backward(g, k);
    else
        build_forward(g, k);
    g->graph = sdpa_new(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    sdpa_set(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops, g->op);
    if (handle != NULL)
        sdpa_set(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    sdpa_finalize(g, g->graph);
    return g->status;
}

void sdpa_graph_free(struct sdpa_graph *g)
{
    while (g->n > 0)
        g->lib->free_descriptor(g->made[--g->n]);
}

#else
typedef int dnn_header_missing; /* a source file must declare something */
#endif
