/* Sums of pieces in rank order, on the host. One element's sum never depends on how the work is cut. */
#include "comm/comm_int.h"

enum { BLOCK = 2048 };

/* A block [from, to) of the sum: the first piece, then each next one added to it. */
#define BLOCKS_OF(NAME, T)                                                                                             \
    static void NAME(T *out, const T *in, int64_t n, int pieces, int64_t from, int64_t to)                             \
    {                                                                                                                  \
        for (int64_t i = from; i < to; i++)                                                                            \
            out[i] = in[i];                                                                                            \
        for (int r = 1; r < pieces; r++)                                                                               \
            for (int64_t i = from; i < to; i++)                                                                        \
                out[i] += in[r * n + i];                                                                               \
    }
BLOCKS_OF(block_f64, double)
BLOCKS_OF(block_f32, float)
BLOCKS_OF(block_i64, int64_t)
BLOCKS_OF(block_i32, int32_t)

/* In fp32, rounded once. */
static void block_bf16(uint16_t *out, const uint16_t *in, int64_t n, int pieces, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        float sum = bf16_to_f32(in[i]);
        for (int r = 1; r < pieces; r++)
            sum += bf16_to_f32(in[r * n + i]);
        out[i] = f32_to_bf16(sum);
    }
}

static void sum_block(const struct tensor *out, const void *pieces, int n_pieces, int64_t n, int64_t from)
{
    int64_t to = min_i64(n, from + BLOCK);
    switch (out->dtype) {
    case DT_F64: block_f64(out->data, pieces, n, n_pieces, from, to); break;
    case DT_F32: block_f32(out->data, pieces, n, n_pieces, from, to); break;
    case DT_I64: block_i64(out->data, pieces, n, n_pieces, from, to); break;
    case DT_I32: block_i32(out->data, pieces, n, n_pieces, from, to); break;
    case DT_BF16: block_bf16(out->data, pieces, n, n_pieces, from, to); break;
    default: break; /* refused before */
    }
}

/* Apart from its caller, so that ranks of one thread do not even ask the OpenMP library who they are. */
__attribute__((noinline)) static void sum_by_team(const struct tensor *out, const void *pieces, int n_pieces, int64_t n,
                                                  int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < n; at += BLOCK)
        sum_block(out, pieces, n_pieces, n, at);
}

void sum_pieces(const struct tensor *out, const void *pieces, int n_pieces, int threads)
{
    int64_t n = tensor_elems(out);
    if (threads > 1 && n > 16 * BLOCK) {
        sum_by_team(out, pieces, n_pieces, n, threads);
        return;
    }
    for (int64_t at = 0; at < n; at += BLOCK)
        sum_block(out, pieces, n_pieces, n, at);
}

void sum_bf16_pieces(const struct tensor *out, const void *pieces, int n_pieces, bool add)
{
    const uint16_t *in = pieces;
    for (int64_t i = 0, n = tensor_elems(out); i < n; i++) {
        double sum = bf16_to_f32(in[i]);
        for (int r = 1; r < n_pieces; r++) {
            double next = sum + (double)bf16_to_f32(in[r * n + i]);
            sum = out->dtype == DT_F64 ? next : (double)(float)next;
        }
        tensor_set(out, i, add ? tensor_get(out, i) + sum : sum);
    }
}

void round_to_bf16(const struct tensor *to, const struct tensor *from)
{
    uint16_t *out = to->data;
    for (int64_t i = 0, n = tensor_elems(from); i < n; i++)
        out[i] = f32_to_bf16((float)tensor_get(from, i));
}
