/* The tensors that a model becomes in another program: their names and shapes by a family's rules, their values one at
 * a time. */
#include "hf/out_int.h"

#include <stdlib.h>
#include <string.h>

static int list_tensors(struct hf_out *w, struct err *e)
{
    struct hf_folder *f = &w->links;
    TRY(mem_array((void **)&w->tensors, (size_t)f->n_links, sizeof *w->tensors, e));
    for (int i = 0; i < f->n_links; i++) {
        const struct hf_link *l = &f->links[i];
        struct hf_out_tensor *last = w->n_tensors ? &w->tensors[w->n_tensors - 1] : NULL;
        if (last != NULL && strcmp(last->name, l->name) == 0) {
            last->end = i + 1;
            continue;
        }
        struct hf_span s;
        int64_t dim[TENSOR_MAX_RANK] = {0};
        const struct param *p = f->params[l->param];
        TRY(hf_span_of(l->rule, l->part, &f->config->model, hf_matrix_of(p).rows, &s, e));
        int rank = hf_part_shape(l->rule, &s, p, dim);
        w->tensors[w->n_tensors++] = (struct hf_out_tensor){.name = l->name,
                                                            .shape = tensor_shape(DT_F32, rank, dim),
                                                            .keep_f32 = (l->rule->flags & HF_KEEP_F32) != 0,
                                                            .integers = (l->rule->flags & HF_INTEGERS) != 0,
                                                            .first = i,
                                                            .end = i + 1};
    }
    return ST_OK;
}

/* What each prediction depth carries of the model a second time. */
static int link_copies(struct hf_folder *f, struct err *e)
{
    for (const struct hf_copy *c = f->family->copies; c != NULL && c->key != NULL; c++) {
        const struct hf_rule *r = hf_copy_rule(f->family, f->config, c);
        for (int i = 0; i < f->n_params && r != NULL; i++)
            for (struct hf_key k = {.layer = -1};
                 strcmp(f->params[i]->key, r->key) == 0 && k.depth < hf_pattern_depths(f->config); k.depth++) {
                char *name = hf_part_name(&f->memory, f->family, f->root, f->config, &k, c->name, -1);
                if (name == NULL)
                    return err_set(e, ST_NOMEM, "out of memory");
                TRY(mem_grow((void **)&f->links, &f->links_cap, (size_t)f->n_links + 1, sizeof *f->links, e));
                f->links[f->n_links++] = (struct hf_link){.param = i, .expert = -1, .rule = r, .part = 0, .name = name};
            }
    }
    return ST_OK;
}

int hf_out_open(struct hf_out *w, const struct hf_export *x, const struct hf_family *fam, struct err *e)
{
    struct hf_folder *f = &w->links;
    *w = (struct hf_out){.x = x};
    arena_init(&f->memory);
    f->family = fam;
    f->root = fam->roots[0];
    f->config = x->config;
    f->params = x->params;
    f->n_params = x->n_params;
    for (int i = 0; i < f->n_params; i++) {
        struct hf_key k;
        hf_key_of(f->params[i]->key, &k);
        const struct hf_rule *r = hf_next_rule(fam, &k, NULL);
        if (r == NULL)
            return err_set(e, ST_UNSUPPORTED, "a %s model has nothing for our parameter %s", fam->model_type,
                           f->params[i]->key);
        TRY(hf_link_rule(f, i, &k, r, e));
    }
    TRY(link_copies(f, e));
    return list_tensors(w, e);
}

void hf_out_close(struct hf_out *w)
{
    free(w->links.links);
    arena_release(&w->links.memory);
    free(w->tensors);
    free(w->values);
}

static int fill(struct hf_out *w, const struct hf_out_tensor *t, struct err *e)
{
    struct hf_folder *f = &w->links;
    for (int i = t->first; i < t->end; i++) {
        const struct hf_link *l = &f->links[i];
        const struct param *p = f->params[l->param];
        struct hf_matrix m = hf_matrix_of(p);
        struct tensor host = tensor_shape(DT_F32, p->rank, p->dim);
        struct hf_span s;
        float add = l->rule->flags & HF_MINUS_ONE && f->config->model.norm_zero_centered ? -1.0f : 0.0f;
        TRY(hf_span_of(l->rule, l->part, &f->config->model, m.rows, &s, e));
        TRY(w->x->fetch(w->x->ctx, l->param, &host, e));
        for (int64_t x = 0; x < m.experts; x++) {
            if (l->expert >= 0 && l->expert != x)
                continue;
            float *to = w->values + (l->rule->flags & HF_FUSED ? x * s.total * m.cols : 0);
            hf_copy_out(&s, m.cols, l->rule->flags & HF_TRANSPOSED, add, (const float *)host.data + x * m.rows * m.cols,
                        to);
        }
    }
    return ST_OK;
}

int hf_out_values(struct hf_out *w, const struct hf_out_tensor *t, float **out, struct err *e)
{
    TRY(mem_grow((void **)&w->values, &w->values_cap, (size_t)tensor_elems(t->scales ? &t->of : &t->shape),
                 sizeof *w->values, e));
    TRY(fill(w, t, e));
    *out = w->values;
    return ST_OK;
}
