/* Blends of several sources: reading "0.7 a 0.3 b", and which source gives which sample. */
#include "data/data_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLEND_MAX = 4096 };

/* One word from *p into a malloc'd string; quotes of either kind protect blanks. */
static int next_word(const char **p, char **word, struct err *e)
{
    *p += strspn(*p, " \t\r\n");
    *word = NULL;
    if (**p == '\0')
        return ST_OK;
    char *out = *word = malloc(strlen(*p) + 1);
    if (out == NULL)
        return err_set(e, ST_NOMEM, "out of memory reading the data paths");
    char quote = '\0';
    for (; **p != '\0' && (quote != '\0' || strchr(" \t\r\n", **p) == NULL); ++*p) {
        if (**p == quote)
            quote = '\0';
        else if (quote == '\0' && (**p == '"' || **p == '\''))
            quote = **p;
        else
            *out++ = **p;
    }
    *out = '\0';
    if (quote != '\0')
        return err_set(e, ST_INVALID, "a %c is not closed in the data paths", quote);
    return ST_OK;
}

static int split_words(struct blend_spec *b, const char *text, struct err *e)
{
    size_t cap = 0;
    for (;;) {
        char *word;
        int st = next_word(&text, &word, e);
        if (st == ST_OK && word == NULL)
            return ST_OK;
        if (st == ST_OK && b->n >= 2 * BLEND_MAX)
            st = err_set(e, ST_INVALID, "more than %d data paths", BLEND_MAX);
        if (st == ST_OK)
            st = mem_grow((void **)&b->paths, &cap, (size_t)b->n + 1, sizeof *b->paths, e);
        if (st != ST_OK) {
            free(word);
            return st;
        }
        b->paths[b->n++] = word;
    }
}

/* Words are pairs of weight and path: keep the paths, and the weights scaled to sum 1. */
static int take_weights(struct blend_spec *b, struct err *e)
{
    double sum = 0;
    int pairs = b->n / 2;
    TRY(mem_array((void **)&b->weights, (size_t)pairs, sizeof *b->weights, e));
    for (int i = 0; i < pairs; i++) {
        double w;
        if (!parse_f64(b->paths[2 * i], &w) || w <= 0) {
            err_set(e, ST_INVALID, "'%.200s' before data path '%.200s' is not a weight > 0", b->paths[2 * i],
                    b->paths[2 * i + 1]);
            return err_hint(e, "weights and paths alternate, as in: 0.7 a 0.3 b");
        }
        b->weights[i] = w;
        sum += w;
    }
    if (!isfinite(sum))
        return err_set(e, ST_INVALID, "the weights of the data paths are too large to add");
    for (int i = 0; i < pairs; i++) {
        b->weights[i] /= sum;
        free(b->paths[2 * i]);
        b->paths[2 * i] = NULL;
    }
    for (int i = 0; i < pairs; i++) {
        b->paths[i] = b->paths[2 * i + 1];
        if (2 * i + 1 != i)
            b->paths[2 * i + 1] = NULL;
    }
    b->n = pairs;
    return ST_OK;
}

int blend_parse(struct blend_spec *b, const char *text, struct err *e)
{
    *b = (struct blend_spec){0};
    double w;
    int st;
    TRY_OUT(split_words(b, text, e));
    if (b->n == 0)
        TRY_OUT(err_set(e, ST_INVALID, "no data path was given"));
    if (b->n > 1 && parse_f64(b->paths[0], &w)) {
        if (b->n % 2 != 0) {
            err_set(e, ST_INVALID, "%d words cannot be pairs of weight and path: '%.200s'", b->n, text);
            TRY_OUT(err_hint(e, "weights and paths alternate; a path like '3' is written ./3"));
        }
        TRY_OUT(take_weights(b, e));
    }
    if (b->n > BLEND_MAX)
        TRY_OUT(err_set(e, ST_INVALID, "more than %d data paths", BLEND_MAX));
    return ST_OK;
out:
    blend_spec_release(b);
    return st;
}

void blend_spec_release(struct blend_spec *b)
{
    file_free_list(b->paths, b->n);
    free(b->weights);
    *b = (struct blend_spec){0};
}

int64_t blend_need(int64_t n, double weight) { return (int64_t)ceil(ceil((double)n * weight) * 1.005); }

int blend_fill(const double *weights, const int64_t *counts, int k, uint16_t *which, uint32_t *sample, int64_t n,
               struct err *e)
{
    int64_t *used;
    TRY(mem_array((void **)&used, (size_t)k, sizeof *used, e));
    for (int64_t i = 0; i < n; i++) {
        double at = (double)max_i64(i, 1), most = -INFINITY;
        int best = -1;
        for (int d = 0; d < k; d++) {
            double due = weights[d] * at; /* two statements: never fused, the same everywhere */
            double behind = due - (double)used[d];
            if (behind > most && (counts == NULL || used[d] < counts[d])) {
                most = behind;
                best = d;
            }
        }
        if (best < 0) {
            free(used);
            return err_set(e, ST_INTERNAL, "a blend of %lld samples ran out of sources after %lld", (long long)n,
                           (long long)i);
        }
        which[i] = (uint16_t)best;
        sample[i] = (uint32_t)used[best]++;
    }
    free(used);
    return ST_OK;
}
