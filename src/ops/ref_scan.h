/* How the references of the scans (ssd, gdn) reach elements, states and documents; only for *_ref.c. */
#ifndef BRAID_OPS_REF_SCAN_H
#define BRAID_OPS_REF_SCAN_H

#include "ops/ops_ref_int.h"

#include <math.h>
#include <string.h>

static inline double at1(const struct tensor *t, int64_t h) { return ((const double *)t->data)[h]; }
static inline double *at3(const struct tensor *t, int64_t b, int64_t s, int64_t h)
{
    return (double *)t->data + b * t->stride[0] + s * t->stride[1] + h * t->stride[2];
}
/* Row n of the state of (b, h). */
static inline double *state_row(const struct tensor *t, int64_t b, int64_t h, int64_t n) { return at3(t, b, h, n); }
/* Row n of the state that enters chunk c. */
static inline double *chunk_row(const struct tensor *t, int64_t b, int64_t c, int64_t h, int64_t n)
{
    return at3(t, b, c, h) + n * t->stride[3];
}
static inline bool begins_document(const struct tensor *doc_start, int64_t b, int64_t t)
{
    return present(doc_start) && ((const int32_t *)doc_start->data)[b * doc_start->stride[0] + t] == t;
}

static inline void clear_rows(const struct tensor *t)
{
    for (int64_t r = 0; r < rows_of(t); r++)
        memset(f64_row(t, r), 0, (size_t)cols_of(t) * sizeof(double));
}
/* t[h] = (t[h] +) sum */
static inline void add_to(const struct tensor *t, int64_t h, double sum, bool add)
{
    if (present(t))
        ((double *)t->data)[h] = sum + (add ? ((double *)t->data)[h] : 0);
}

#endif
