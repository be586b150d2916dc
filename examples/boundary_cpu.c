/* The mHC boundary on the CPU, from plain C: forward, backward, and the gradient of x against a finite difference.
 *
 *   make lib && build/lib_example_cpu
 *   cc -Isrc/lib examples/boundary_cpu.c build/libbraidk.so -lm */
#include "braidk.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 5, STREAMS = 4, CHANNELS = 16, K = STREAMS * CHANNELS, N = STREAMS * STREAMS + 2 * STREAMS };

static struct braidk_tensor tensor(double *data, int rank, int64_t rows, int64_t columns)
{
    struct braidk_tensor t = {.data = data, .rank = rank, .dtype = BRAIDK_F64};
    t.shape[0] = rows;
    t.shape[1] = rank == 2 ? columns : 0;
    t.stride[0] = rank == 2 ? columns : 1;
    t.stride[1] = rank == 2;
    return t;
}

static double *numbers(int64_t n, double scale)
{
    double *p = malloc((size_t)n * sizeof *p);
    for (int64_t i = 0; p != NULL && i < n; i++)
        p[i] = scale * (rand() / (double)RAND_MAX - 0.5);
    return p;
}

static int failed(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

int main(void)
{
    struct braidk *k;
    char why[512];
    if (braidk_open(BRAIDK_HOST, &k, why, sizeof why) != BRAIDK_OK)
        return failed("braidk_open", why);
    printf("libbraidk %s, on %s\n", braidk_build(), braidk_device(k));

    struct braidk_mhc mhc = {
        .streams = STREAMS, .iterations = 20, .profile = BRAIDK_MHC_D, .norm = 1, .root_eps = 1e-6, .norm_eps = 1e-5};
    double *x = numbers(ROWS * K, 2);
    struct braidk_mhc_boundary_args a = {
        .size = sizeof a,
        .x = tensor(x, 2, ROWS, K),
        .f = tensor(numbers(ROWS * CHANNELS, 2), 2, ROWS, CHANNELS),
        .coef_in = tensor(numbers(ROWS * N, 2), 2, ROWS, N),
        .fn = tensor(numbers(N * K, 1), 2, N, K),
        .base = tensor(numbers(N, 1), 1, N, 0),
        .scale = tensor(numbers(3, 1), 1, 3, 0),
        .norm_weight = tensor(numbers(CHANNELS, 1), 1, CHANNELS, 0),
        .y = tensor(numbers(ROWS * K, 0), 2, ROWS, K),
        .h = tensor(numbers(ROWS * CHANNELS, 0), 2, ROWS, CHANNELS),
        .coef = tensor(numbers(ROWS * N, 0), 2, ROWS, N),
        .stat = tensor(numbers(ROWS * (N + 2), 0), 2, ROWS, N + 2),
        .mhc = mhc,
    };
    if (braidk_mhc_boundary_work(k, &a, &a.work.bytes, why, sizeof why) != BRAIDK_OK)
        return failed("mhc_boundary_work", why);
    a.work.data = aligned_alloc(256, (size_t)a.work.bytes + 256);
    if (braidk_mhc_boundary_supported(k, &a, why, sizeof why) != BRAIDK_OK)
        return failed("mhc_boundary_supported", why);
    printf("which kernels: %s\n", why);
    if (braidk_mhc_boundary(k, &a, NULL, why, sizeof why) != BRAIDK_OK)
        return failed("mhc_boundary", why);

    struct braidk_mhc_boundary_bwd_args b = {
        .size = sizeof b,
        .dh = tensor(numbers(ROWS * CHANNELS, 2), 2, ROWS, CHANNELS),
        .x = a.x,
        .f = a.f,
        .coef_in = a.coef_in,
        .fn = a.fn,
        .base = a.base,
        .scale = a.scale,
        .norm_weight = a.norm_weight,
        .y = a.y,
        .coef = a.coef,
        .stat = a.stat,
        .dx = tensor(numbers(ROWS * K, 0), 2, ROWS, K),
        .df = tensor(numbers(ROWS * CHANNELS, 0), 2, ROWS, CHANNELS),
        .dcoef_in = tensor(numbers(ROWS * N, 0), 2, ROWS, N),
        .dfn = tensor(numbers(N * K, 0), 2, N, K),
        .dbase = tensor(numbers(N, 0), 1, N, 0),
        .dscale = tensor(numbers(3, 0), 1, 3, 0),
        .dnorm_weight = tensor(numbers(CHANNELS, 0), 1, CHANNELS, 0),
        .mhc = mhc,
    };
    if (braidk_mhc_boundary_bwd_work(k, &b, &b.work.bytes, why, sizeof why) != BRAIDK_OK)
        return failed("mhc_boundary_bwd_work", why);
    b.work.data = aligned_alloc(256, (size_t)b.work.bytes + 256);
    if (braidk_mhc_boundary_bwd(k, &b, NULL, why, sizeof why) != BRAIDK_OK)
        return failed("mhc_boundary_bwd", why);

    double worst = 0, *dx = b.dx.data, *dh = b.dh.data, *h = a.h.data;
    for (int i = 0; i < ROWS * K; i++) {
        double kept = x[i], sum[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            x[i] = kept + (side == 0 ? 1e-5 : -1e-5);
            if (braidk_mhc_boundary(k, &a, NULL, why, sizeof why) != BRAIDK_OK)
                return failed("mhc_boundary", why);
            for (int j = 0; j < ROWS * CHANNELS; j++)
                sum[side] += h[j] * dh[j];
        }
        x[i] = kept;
        worst = fmax(worst, fabs((sum[0] - sum[1]) / 2e-5 - dx[i]));
    }
    printf("gradient of x against finite differences: worst difference %.1e\n", worst);
    braidk_close(k);
    return worst < 1e-7 ? 0 : failed("the gradient of x", "differs from finite differences");
}
