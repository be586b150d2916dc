/* embed, reference; see embed.h. */
#include "ops/embed/embed_int.h"
#include "ops/embed/embed.h"
#include "ops/ops_ref_int.h"

static bool held(int64_t token, int64_t first, const struct tensor *w)
{
    return token >= first && token < first + w->dim[0];
}

int embed_fwd_ref(struct lane *l, const struct embed_fwd_args *a)
{
    TRY(embed_fwd_check(a, l->err));
    TRY(embed_token_check("embed_fwd", &a->token, a->w.dim[0], a->part, l->err));
    const int32_t *token = a->token.data;
    for (int64_t t = 0; t < a->token.dim[0]; t++)
        for (int64_t c = 0; c < a->w.dim[1]; c++)
            f64_row(&a->y, t)[c] = held(token[t], a->first, &a->w) ? f64_row(&a->w, token[t] - a->first)[c] : 0;
    return ST_OK;
}

int embed_bwd_ref(struct lane *l, const struct embed_bwd_args *a)
{
    TRY(embed_bwd_check(a, l->err));
    TRY(embed_token_check("embed_bwd", &a->token, a->dw.dim[0], a->part, l->err));
    const int32_t *token = a->token.data;
    for (int64_t v = 0; !a->acc_dw && v < a->dw.dim[0]; v++)
        for (int64_t c = 0; c < a->dw.dim[1]; c++)
            f64_row(&a->dw, v)[c] = 0;
    for (int64_t t = 0; t < a->token.dim[0]; t++)
        for (int64_t c = 0; held(token[t], a->first, &a->dw) && c < a->dw.dim[1]; c++)
            f64_row(&a->dw, token[t] - a->first)[c] += f64_row(&a->dy, t)[c];
    return ST_OK;
}
