/* Whether a pattern that is well formed can be built: asked before anything is declared or
 * allocated. */
#include "model/model.h"

static int check_symbol(const struct pattern *p, char symbol, int at, struct err *e)
{
    const struct core_kind *core = core_find(symbol);
    if (core != NULL && core->declare != NULL)
        return ST_OK;
    return pattern_refuse(p->text, (size_t)at, e, "there is no core yet for '%c' (%s)", symbol,
                          core != NULL ? core->name : "unknown");
}

int pattern_check_cores(const struct pattern *p, struct err *e)
{
    if (p->n_layers == 0)
        return err_set(e, ST_USAGE, "model.pattern is empty: a model needs at least one layer");
    for (int l = 0; l < p->n_layers; l++)
        TRY(check_symbol(p, p->symbols[l], p->at[l], e));
    for (int l = 0; l < p->n_mtp_layers; l++)
        TRY(check_symbol(p, p->mtp_symbols[l], p->mtp_at + l, e));
    if (p->n_mtp_depths > MTP_MAX_DEPTHS)
        return pattern_refuse(p->text, (size_t)p->mtp_at, e,
                              "there are %d MTP depths, at most %d are supported: they start", p->n_mtp_depths,
                              MTP_MAX_DEPTHS);
    return ST_OK;
}
