/* xent, fast CPU version; see xent.h. Per chunk of rows: logits by GEMM into work, then softmax,
 * loss and gradient of the logits in place, row by row in parallel, then two GEMMs for dh and dw.
 *
 * The chunk sets how dw and dbias are grouped into partial sums (and which kernel OpenBLAS takes),
 * so it changes results by fp32 rounding only; loss is summed in double over all rows in order. */
#include "ops/cpu_gemm.h"
#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"
#include "ops/xent/xent.h"
#include "ops/xent/xent_int.h"

#include <limits.h>
#include <math.h>
#include <string.h>

/* Work: per-row nll in double, then the chunk's logits, rows padded to a cache line. */
static int64_t padded_vocab(const struct xent_args *a) { return round_up(a->w.dim[0], 16); }
static int64_t nll_bytes(const struct xent_args *a)
{
    return round_up(a->h.dim[0] * (int64_t)sizeof(double), DEV_ALIGN);
}

int64_t CPU_NAME(xent_work_cpu)(const struct xent_args *a)
{
    return nll_bytes(a) + xent_rows_at_once(a) * padded_vocab(a) * (int64_t)sizeof(float);
}

/* ---- GEMM ------------------------------------------------------------------------------------ */

struct mat {
    float *data;
    int64_t ld;
};

static struct mat mat_rows(const struct tensor *t, int64_t first)
{
    int64_t ld = t->dim[0] <= 1 ? t->dim[1] : t->stride[0];
    return (struct mat){(float *)t->data + first * t->stride[0], max_i64(1, ld)};
}

/* c[m, n] = op(a) op(b) + beta c */
static void matmul(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, struct mat a, struct mat b, float beta,
                   struct mat c)
{
    for (int64_t i = 0; k == 0 && beta == 0 && i < m; i++)
        memset(c.data + i * c.ld, 0, (size_t)n * sizeof(float));
    if (m == 0 || n == 0 || k == 0)
        return;
    sgemm(&(struct sgemm){.trans_a = trans_a,
                          .trans_b = trans_b,
                          .m = m,
                          .n = n,
                          .k = k,
                          .alpha = 1,
                          .a = a.data,
                          .lda = a.ld,
                          .b = b.data,
                          .ldb = b.ld,
                          .beta = beta,
                          .c = c.data,
                          .ldc = c.ld});
}

/* BLAS counts in int and wants rows that do not overlap. */
static int check_blas(const char *name, const struct tensor *t, struct err *e)
{
    if (!present(t))
        return ST_OK;
    if (t->dim[0] > INT_MAX || t->dim[1] > INT_MAX || t->stride[0] > INT_MAX)
        return err_set(e, ST_UNSUPPORTED, "xent: tensor %s is too large for BLAS: %lld x %lld, stride %lld", name,
                       (long long)t->dim[0], (long long)t->dim[1], (long long)t->stride[0]);
    if (t->dim[0] > 1 && t->stride[0] < t->dim[1])
        return err_set(e, ST_INVALID, "xent: rows of tensor %s overlap (stride %lld, %lld columns)", name,
                       (long long)t->stride[0], (long long)t->dim[1]);
    return ST_OK;
}

/* ---- one row --------------------------------------------------------------------------------- */

/* In lanes: not every compiler turns a maximum of floats into SIMD code by itself. NaN is passed
 * over here and comes back through the exponentials. */
static float row_max(const float *z, int64_t n)
{
    enum { LANES = 32 };
    float lane[LANES], max = -INFINITY;
    int64_t even = n / LANES * LANES;
    for (int i = 0; i < LANES; i++)
        lane[i] = -INFINITY;
    for (int64_t v = 0; v < even; v += LANES) {
#pragma omp simd
        for (int i = 0; i < LANES; i++)
            lane[i] = z[v + i] > lane[i] ? z[v + i] : lane[i];
    }
    for (int i = 0; i < LANES; i++)
        max = lane[i] > max ? lane[i] : max;
    for (int64_t v = even; v < n; v++)
        max = z[v] > max ? z[v] : max;
    return max;
}

/* z = exp(z - max), and its sum: fp32 within a block, double over blocks. What is below e^-70 of
 * the largest counts as 0, lest its gradient become a subnormal number that slows the GEMMs. */
static double row_exp(float *z, float max, int64_t n)
{
    enum { BLOCK = 1024 };
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        float *at = z + first, sum = 0;
        int64_t len = min_i64(BLOCK, n - first);
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < len; v++) {
            float x = at[v] - max, e = fast_expf(x);
            e = x < -70.0f ? 0.0f : e;
            at[v] = e;
            sum += e;
        }
        total += (double)sum;
    }
    return total;
}

/* Turns the logits z of row r into their gradient (if wanted) and returns the row's nll. */
static double row_loss(const struct xent_args *a, int64_t r, float *z)
{
    int64_t vocab = a->w.dim[0];
    int32_t label = ((const int32_t *)a->label.data)[r];
    const float *bias = a->bias.data;
    if (bias != NULL) {
#pragma omp simd
        for (int64_t v = 0; v < vocab; v++)
            z[v] += bias[v];
    }
    if (present(&a->logits))
        memcpy(f32_row(&a->logits, r), z, (size_t)vocab * sizeof *z);
    if (label < 0) {
        memset(z, 0, (size_t)vocab * sizeof *z);
        return 0;
    }
    float max = row_max(z, vocab);
    double below = (double)max - (double)z[label]; /* first: lse - z[label] would cancel */
    double sum = row_exp(z, max, vocab), log_sum = log(sum);
    if (present(&a->dh)) {
        double scale = ((const double *)a->scale.data)[0];
        float k = (float)(scale * (1 + 2 * a->z_loss * ((double)max + log_sum)) / sum);
#pragma omp simd
        for (int64_t v = 0; v < vocab; v++)
            z[v] *= k;
        z[label] -= (float)scale;
    }
    return below + log_sum;
}

/* ---- one chunk ------------------------------------------------------------------------------- */

static void add_dbias(const struct xent_args *a, struct mat dz, int64_t rows, bool add)
{
    enum { COLS = 64 };
    int64_t vocab = a->w.dim[0];
    float *dbias = a->dbias.data;
#pragma omp parallel for schedule(static) if (rows * vocab > 16384)
    for (int64_t first = 0; first < vocab; first += COLS) {
        int64_t n = min_i64(COLS, vocab - first);
        float sum[COLS] = {0};
        for (int64_t r = 0; r < rows; r++) {
            const float *row = dz.data + r * dz.ld + first;
#pragma omp simd
            for (int64_t v = 0; v < n; v++)
                sum[v] += row[v];
        }
        for (int64_t v = 0; v < n; v++)
            dbias[first + v] = (add ? dbias[first + v] : 0.0f) + sum[v];
    }
}

static void run_chunk(const struct xent_args *a, int64_t first, int64_t rows, double *nll, struct mat z)
{
    int64_t vocab = a->w.dim[0], d = a->w.dim[1];
    struct mat h = mat_rows(&a->h, first), w = mat_rows(&a->w, 0);
    matmul(false, true, rows, vocab, d, h, w, 0.0f, z);
#pragma omp parallel for schedule(static) if (rows * vocab > 4096)
    for (int64_t r = 0; r < rows; r++)
        nll[first + r] = row_loss(a, first + r, z.data + r * z.ld);
    if (!present(&a->dh))
        return;
    bool add_dw = a->acc_dw || first > 0, add_db = a->acc_dbias || first > 0;
    matmul(false, false, rows, d, vocab, z, w, 0.0f, mat_rows(&a->dh, first));
    if (present(&a->dw))
        matmul(true, false, vocab, d, rows, z, h, add_dw ? 1.0f : 0.0f, mat_rows(&a->dw, 0));
    if (present(&a->dbias))
        add_dbias(a, z, rows, add_db);
}

static void finish(const struct xent_args *a, const double *nll)
{
    const int32_t *label = a->label.data;
    double sum = 0, count = 0, *loss = a->loss.data;
    float *out = a->nll.data;
    for (int64_t r = 0; r < a->h.dim[0]; r++) {
        sum += nll[r];
        count += label[r] >= 0;
        if (out != NULL)
            out[r] = (float)nll[r];
    }
    loss[0] = (a->acc_loss ? loss[0] : 0) + sum;
    loss[1] = (a->acc_loss ? loss[1] : 0) + count;
}

int CPU_NAME(xent_cpu)(struct lane *l, const struct xent_args *a)
{
    TRY(xent_check(a, l->err));
    TRY(check_blas("h", &a->h, l->err));
    TRY(check_blas("w", &a->w, l->err));
    TRY(check_blas("dh", &a->dh, l->err));
    TRY(check_blas("dw", &a->dw, l->err));
    TRY(xent_label_check(a, l->err));
    TRY(check_work("xent", &a->work, CPU_NAME(xent_work_cpu)(a), l->err));
    int64_t rows = a->h.dim[0], chunk = xent_rows_at_once(a);
    double *nll = a->work.data;
    struct mat z = {(float *)((char *)a->work.data + nll_bytes(a)), max_i64(1, padded_vocab(a))};
    for (int64_t first = 0; first < rows; first += chunk)
        run_chunk(a, first, min_i64(chunk, rows - first), nll, z);
    if (rows == 0 && present(&a->dh)) { /* no chunk wrote the sums */
        struct mat none = {NULL, 1};
        if (present(&a->dw) && !a->acc_dw)
            matmul(true, false, a->w.dim[0], a->w.dim[1], 0, none, none, 0.0f, mat_rows(&a->dw, 0));
        if (present(&a->dbias) && !a->acc_dbias)
            memset(a->dbias.data, 0, (size_t)tensor_bytes(&a->dbias));
    }
    finish(a, nll);
    return ST_OK;
}
