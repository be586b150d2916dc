/* Parameters of a mixture of experts, and this rank's share of them; see moe.c. */
#include "layers/moe_int.h"

static struct param expert_matrix(const char *key, const struct moe *m, int64_t out, int64_t in, double std)
{
    return (struct param){.key = key,
                          .rank = 3,
                          .dim = {m->local, out, in},
                          .init = INIT_NORMAL,
                          .init_a = std,
                          .decay = true,
                          .expert = true};
}

static struct param expert_vector(const char *key, const struct moe *m, int64_t n)
{
    return (struct param){.key = key, .rank = 2, .dim = {m->local, n}, .init = INIT_ZERO, .expert = true, .wide = true};
}

/* Gate and up rows in alternating blocks, as the activation reads them; on disk they stay halves. */
static struct row_layout interleaved_rows(const struct moe *m)
{
    int64_t g = m->act.interleave;
    if (g == 0)
        return (struct row_layout){0};
    return (struct row_layout){
        .n_sections = 2, .groups = m->ffn / g, .rows = {g, g}, .grouped_in_memory = true, .matrices = m->local};
}

/* Token to experts. Until a checkpoint brings a trained one, token t goes to experts t, t + 1, ... */
static struct weight declare_table(struct build *b, const struct moe *m)
{
    struct param table = {.key = "mlp.router.tid2eid",
                          .rank = 2,
                          .dim = {m->vocab, m->k},
                          .init = INIT_HASH,
                          .buffer = true,
                          .n_values = m->experts};
    param_replicate(&table, GRAD_COMPLETE);
    return m->hashed ? build_weight(b, &table) : no_weight();
}

/* This rank's slice of the width of each expert, where several share them: gate and up rows of fc1 with their biases,
 * columns of fc2. */
static void slice_experts(struct build *b, struct moe *m, struct param *p1, struct param *b1, struct param *p2)
{
    int etp = b->mesh->etp, rank = b->mesh->etp_rank;
    int64_t blocks = m->act.interleave > 0 ? m->ffn / m->act.interleave : m->ffn;
    int64_t section = m->act.interleave > 0 ? m->wide : m->ffn; /* gate and up alternate, or follow each other */
    for (int64_t at = 0; at < m->wide; at += section) {
        param_split_section(p1, 1, section, UNIT_FFN, blocks);
        param_split_section(b1, 1, section, UNIT_FFN, blocks);
    }
    param_split_section(p2, 2, m->ffn, UNIT_FFN, blocks);
    if (b->g->err.code != ST_OK || param_cut(p1, etp, rank, &b->g->err) != ST_OK ||
        param_cut(b1, etp, rank, &b->g->err) != ST_OK || param_cut(p2, etp, rank, &b->g->err) != ST_OK)
        return;
    m->ffn /= etp;
    m->wide /= etp;
}

void moe_declare_params(struct build *b, struct moe *m, struct moe_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    struct param router = param_matrix("mlp.router.weight", m->experts, m->width, c->init_std);
    struct param router_bias = param_vector("mlp.router.bias", m->experts, INIT_ZERO);
    struct param bias = param_vector("mlp.router.expert_bias", m->experts, INIT_ZERO);
    struct param p1 = expert_matrix("mlp.experts.linear_fc1.weight", m, m->wide, m->width, c->init_std);
    struct param p2 = expert_matrix("mlp.experts.linear_fc2.weight", m, m->width, m->ffn, output_std(b));
    struct param b1 = expert_vector("mlp.experts.linear_fc1.bias", m, m->wide),
                 b2 = expert_vector("mlp.experts.linear_fc2.bias", m, m->width);
    bias.buffer = true;
    p1.rows = b1.rows = interleaved_rows(m);
    struct param *of_experts[] = {&p1, &p2, &b1, &b2};
    for (int i = 0; i < countof(of_experts); i++) {
        if (b->mesh->ep > 1) {
            of_experts[i]->shard.full = m->experts;
            of_experts[i]->shard.first = b->mesh->ep_rank * m->local;
        }
    }
    slice_experts(b, m, &p1, &b1, &p2);
    param_split(&b2, 0, UNIT_EXPERTS, m->experts);
    for (int i = 0; i < countof(of_experts); i++)
        of_experts[i]->split.grad = GRAD_OVER_TOKENS; /* ranks that hold the same experts */
    param_replicate(&router, GRAD_OVER_TOKENS);
    param_replicate(&router_bias, GRAD_OVER_TOKENS);
    param_replicate(&bias, GRAD_COMPLETE);
    s->router = build_weight(b, &router);
    s->router_bias = c->router_linear_bias ? build_weight(b, &router_bias) : no_weight();
    s->table = declare_table(b, m);
    s->bias = c->router_bias && !m->hashed ? build_weight(b, &bias) : no_weight();
    build_expert_weights(b, &p1, &p2, &s->w1, &s->w2);
    s->b1 = c->expert_bias ? build_weight(b, &b1) : no_weight();
    /* The results of slices are added up: one of them has the bias of fc2. */
    s->b2 = c->expert_bias && b->mesh->etp_rank == 0 ? build_weight(b, &b2) : no_weight();
}
