/* The model for people: `braid plan` prints these. */
#include "model/model.h"

#include <string.h>

void model_print_stack(const struct model *m, struct buf *out)
{
    char text[32];
    buf_addf(out, "%5s %-3s %-12s %-26s %12s\n", "layer", "", "core", "keys", "parameters");
    for (int l = 0; l < m->pattern.n_layers; l++) {
        int64_t sum = 0;
        for (int k = 0; k < m->params.n; k++)
            sum += m->params.list[k].p.layer == l ? param_elems(&m->params.list[k].p) : 0;
        const struct core_kind *core = core_find(m->pattern.symbols[l]);
        char keys[48];
        snprintf(keys, sizeof keys, "decoder.layers.%d.*", l);
        buf_addf(out, "%5d %-3c %-12s %-26s %12lld\n", l, m->pattern.symbols[l], core->name, keys, (long long)sum);
    }
    int64_t rest = 0;
    for (int k = 0; k < m->params.n; k++)
        rest += m->params.list[k].p.layer < 0 ? param_elems(&m->params.list[k].p) : 0;
    buf_addf(out, "%5s %-3s %-12s %-26s %12lld\n", "-", "", "ends", m->cfg->model.tied ? "embedding (tied), final_norm" : "embedding, final_norm, output", (long long)rest);
    buf_addf(out, "parameters: %lld (%s)\n", (long long)param_table_elems(&m->params),
             human_count((double)param_table_elems(&m->params), text, sizeof text));
}

void model_print_params(const struct model *m, struct buf *out)
{
    buf_addf(out, "%-58s %-18s %s\n", "key", "shape", "decay");
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        struct tensor t = tensor_shape(m->dev->real, p->rank, p->dim);
        char shape[64];
        buf_addf(out, "%-58s %-18s %s\n", p->key, tensor_text(&t, shape, sizeof shape), p->decay ? "yes" : "no");
    }
}
