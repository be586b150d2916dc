/* Rotary frequencies and tables: plain, linear, Llama-3 and YaRN scaling; see rope.h. */
#include "ops/rope/rope.h"

#include <math.h>

static const double two_pi = 6.283185307179586476925286766559;

static bool positive(double x) { return isfinite(x) && x > 0; }

int rope_config_check(const struct rope_config *c, struct err *e)
{
    if (c->dim <= 0 || c->dim % 2 != 0 || c->dim > 1 << 20)
        return err_set(e, ST_INVALID, "rope: dim is %lld, expected an even number from 2 to %d", (long long)c->dim,
                       1 << 20);
    if (!isfinite(c->base) || c->base <= 1)
        return err_set(e, ST_INVALID, "rope: base is %g, expected a number above 1", c->base);
    if ((int)c->scaling < ROPE_PLAIN || c->scaling > ROPE_YARN)
        return err_set(e, ST_INVALID, "rope: scaling %d is not known", (int)c->scaling);
    if (c->scaling == ROPE_PLAIN)
        return ST_OK;
    if (!positive(c->factor))
        return err_set(e, ST_INVALID, "rope: scaling factor is %g, expected a number above 0", c->factor);
    if (c->scaling == ROPE_LINEAR)
        return ST_OK;
    if (c->original <= 0)
        return err_set(e, ST_INVALID, "rope: original context length is %lld, expected 1 or more",
                       (long long)c->original);
    if (c->scaling == ROPE_LLAMA3 && (!positive(c->low) || !isfinite(c->high) || c->high <= c->low))
        return err_set(e, ST_INVALID, "rope: low and high frequency factors are %g and %g, expected 0 < low < high",
                       c->low, c->high);
    if (c->scaling == ROPE_YARN) {
        if (!positive(c->beta_slow) || !isfinite(c->beta_fast) || c->beta_fast <= c->beta_slow)
            return err_set(e, ST_INVALID, "rope: beta_slow and beta_fast are %g and %g, expected 0 < slow < fast",
                           c->beta_slow, c->beta_fast);
        if (!isfinite(c->mscale) || c->mscale < 0 || !isfinite(c->mscale_all_dim) || c->mscale_all_dim < 0)
            return err_set(e, ST_INVALID, "rope: mscale and mscale_all_dim are %g and %g, expected 0 or more",
                           c->mscale, c->mscale_all_dim);
    }
    return ST_OK;
}

/* Long wavelengths are stretched by the factor, short ones kept, those between blended. */
static double llama3_frequency(const struct rope_config *c, double w)
{
    double length = (double)c->original, wavelength = two_pi / w;
    if (wavelength > length / c->low)
        return w / c->factor;
    if (wavelength < length / c->high)
        return w;
    double t = (length / wavelength - c->low) / (c->high - c->low);
    return (1 - t) * w / c->factor + t * w;
}

/* The (real-valued) channel pair that turns `turns` times over the original length. */
static double yarn_pair(const struct rope_config *c, double turns)
{
    return (double)c->dim * log((double)c->original / (two_pi * turns)) / (2 * log(c->base));
}

static double yarn_frequency(const struct rope_config *c, int64_t k, double w)
{
    double fast = yarn_pair(c, c->beta_fast), slow = yarn_pair(c, c->beta_slow);
    double low = fmax(c->exact ? fast : floor(fast), 0);
    double high = fmin(c->exact ? slow : ceil(slow), (double)(c->dim - 1));
    if (low == high)
        high += 0.001;
    double keep = 1 - fmin(fmax(((double)k - low) / (high - low), 0), 1);
    return w / c->factor * (1 - keep) + w * keep;
}

static double frequency(const struct rope_config *c, int64_t k)
{
    double w = pow(c->base, -2 * (double)k / (double)c->dim);
    if (c->scaling == ROPE_LLAMA3)
        return llama3_frequency(c, w);
    return c->scaling == ROPE_YARN ? yarn_frequency(c, k, w) : w;
}

static double mscale(double factor, double m) { return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1; }

/* What multiplies cos and sin. */
static double amplitude(const struct rope_config *c)
{
    if (c->scaling != ROPE_YARN)
        return 1;
    if (c->mscale == 0 && c->mscale_all_dim == 0)
        return mscale(c->factor, 1);
    return mscale(c->factor, c->mscale) / mscale(c->factor, c->mscale_all_dim);
}

double rope_frequencies(const struct rope_config *c, double *freq)
{
    for (int64_t k = 0; k < c->dim / 2; k++)
        freq[k] = frequency(c, k);
    return amplitude(c);
}

void rope_tables(const struct rope_config *c, struct tensor *cos_table, struct tensor *sin_table)
{
    int64_t positions = cos_table->dim[0], pairs = c->dim / 2;
    double gain = amplitude(c), stretch = c->scaling == ROPE_LINEAR ? c->factor : 1;
    for (int64_t k = 0; k < pairs; k++) {
        double freq = frequency(c, k);
        for (int64_t p = 0; p < positions; p++) {
            double angle = (double)p / stretch * freq;
            if (cos_table->data != NULL)
                tensor_set(cos_table, p * pairs + k, gain * cos(angle));
            if (sin_table->data != NULL)
                tensor_set(sin_table, p * pairs + k, gain * sin(angle));
        }
    }
}
