/* The peak rate of a processor: what "100 %" means on a progress line and in `braid bench`.
 *
 * Every thread runs chains of fused multiply-adds that stay in registers, in the widest vectors the fast ops
 * are compiled for. No product of matrices can be faster, so a share of this peak is below 100 %. */
#include "dev/dev.h"

#include <omp.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    CHAINS = 12,     /* independent sums: more than latency times issue width, and they fit 16 registers */
    STEPS = 1 << 15, /* of every chain in one timing: about 0.1 ms */
    ROUNDS = 40,
};

/* Runs STEPS of every chain; writes a value that depends on all of them, and returns the FLOPs. */
typedef double chain_fn(float *sink);

#if defined(__x86_64__)

__attribute__((target("avx512f"))) static double chain_avx512(float *sink)
{
    __m512 sum[CHAINS], scale = _mm512_set1_ps(0.5f), add = _mm512_set1_ps(1.0f);
    for (int c = 0; c < CHAINS; c++)
        sum[c] = _mm512_set1_ps((float)c);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sum[c] = _mm512_fmadd_ps(sum[c], scale, add);
    }
    for (int c = 1; c < CHAINS; c++)
        sum[0] = _mm512_add_ps(sum[0], sum[c]);
    *sink = _mm512_cvtss_f32(sum[0]);
    return 2.0 * 16 * CHAINS * STEPS;
}

__attribute__((target("avx2,fma"))) static double chain_avx2(float *sink)
{
    __m256 sum[CHAINS], scale = _mm256_set1_ps(0.5f), add = _mm256_set1_ps(1.0f);
    for (int c = 0; c < CHAINS; c++)
        sum[c] = _mm256_set1_ps((float)c);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sum[c] = _mm256_fmadd_ps(sum[c], scale, add);
    }
    for (int c = 1; c < CHAINS; c++)
        sum[0] = _mm256_add_ps(sum[0], sum[c]);
    *sink = _mm256_cvtss_f32(sum[0]);
    return 2.0 * 8 * CHAINS * STEPS;
}

#endif

/* Four lanes, which every 64-bit processor has; the compiler fuses where it may. */
static double chain_base(float *sink)
{
    typedef float vec __attribute__((vector_size(16)));
    vec sum[CHAINS], scale = {0.5f, 0.5f, 0.5f, 0.5f}, add = {1, 1, 1, 1};
    for (int c = 0; c < CHAINS; c++)
        sum[c] = add * (float)c;
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sum[c] = sum[c] * scale + add;
    }
    for (int c = 1; c < CHAINS; c++)
        sum[0] += sum[c];
    *sink = sum[0][0];
    return 2.0 * 4 * CHAINS * STEPS;
}

static chain_fn *pick_chain(void)
{
#if defined(__x86_64__)
    const char *isa = cpu_isa();
    if (strcmp(isa, "avx512") == 0)
        return chain_avx512;
    if (strcmp(isa, "avx2") == 0)
        return chain_avx2;
#endif
    return chain_base;
}

/* The best of short timings: one that another process interrupted does not count. */
static double one_thread(chain_fn *chain)
{
    double best = 0;
    for (int r = 0; r < ROUNDS; r++) {
        volatile float kept;
        float sink;
        double begin = time_now(), flops = chain(&sink), rate = flops / (time_now() - begin);
        kept = sink;
        (void)kept;
        best = rate > best ? rate : best;
    }
    return best;
}

/* All threads at once: a processor with all cores busy may run at a lower clock. */
static double all_threads(int threads)
{
    chain_fn *chain = pick_chain();
    double sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    {
#pragma omp barrier
        sum += one_thread(chain);
    }
    int cores = cpu_count();
    return threads > cores ? sum * cores / threads : sum; /* threads that share a core also share its rate */
}

double dev_peak_flops(struct dev *d) { return d->kind == DEV_CPU ? all_threads(d->n_threads) : 0; }
