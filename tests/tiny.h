/* A model small enough to check in milliseconds, and the few lines that run it. */
#ifndef BRAID_TESTS_TINY_H
#define BRAID_TESTS_TINY_H

#include "model/model.h"
#include "ops/mhc/mhc.h"
#include "ops/router/router.h"
#include "plan/exec.h"
#include "support.h"

/* Options as on a command line, without the dashes: "model.qk_norm=on train.seq=12". */
static inline int tiny_set(struct config *c, const char *options, struct err *e)
{
    char word[256];
    for (const char *p = options; *p != '\0';) {
        size_t n = strcspn(p, " ");
        assert_true(n < sizeof word);
        memcpy(word, p, n);
        word[n] = '\0';
        p += n + (p[n] == ' ');
        char *eq = strchr(word, '=');
        if (n == 0)
            continue;
        assert_non_null(eq);
        *eq = '\0';
        TRY(config_set(c, word, eq + 1, NULL, e));
    }
    return ST_OK;
}

static inline void tiny_config(struct config *c, const char *options)
{
    struct err e = {0};
    assert_ok(config_init(c, &e), &e);
    assert_ok(tiny_set(c,
                       "model.pattern=*- model.hidden=16 model.heads=4 model.kv_heads=2 model.ffn=12 "
                       "model.vocab=23 "
                       "model.init_std=0.2 train.seq=8 train.micro_batch=2 run.threads=1 run.quiet=on",
                       &e),
              &e);
    assert_ok(tiny_set(c, options, &e), &e);
    assert_ok(config_finish(c, &e), &e);
}

/* Models that every general test goes through: all schedules bit for bit, gradient check, decoding.
 * A new core or joint adds a line, with an attention and an MLP layer beside it (the recompute
 * names are tried on all). */
static inline const char *const *tiny_models(int *n)
{
    static const char *const models[] = {
        "model.pattern=*-*- model.dropout=0.1 model.attention_dropout=0.2",
        /* every part of a dense model that has a slot of its own */
        "model.pattern=*-*- model.qk_norm=on model.attn_gate=on model.attn_sink=learnable "
        "model.attn_window=5 "
        "model.attn_window_skip=3 model.bias=on model.dropout=0.2 data.eod=on data.eod_mask=on",
        /* LayerNorm and learned positions, in prediction depths and packed documents too; q and k normed by row */
        "model.pattern=*-M*-/*- model.norm=layer model.position=learned model.max_position=100 model.act=gelu "
        "model.bias=on model.dropout=0.1 "
        "model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 model.mamba_chunk=3 data.eod=on "
        "data.eod_mask=on",
        "model.pattern=*E*- model.qk_norm=row model.attn_bias=on model.mlp_bias=on model.norm_zero_centered=on "
        "model.experts=4 model.router_linear_bias=on model.expert_bias=on",
        "model.pattern=M*M- model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 "
        "model.mamba_chunk=3",
        "model.pattern=M-*M model.mamba_heads=3 model.mamba_head_dim=5 model.mamba_state=4 "
        "model.mamba_groups=1 model.mamba_conv=2 model.mamba_dt_min=0.01 model.mamba_dt_max=0.9 "
        "model.mamba_norm=whole model.dropout=0.1 data.eod=on data.eod_mask=on",
        "model.pattern=*G-G model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 "
        "model.gdn_value_dim=4 model.gdn_chunk=3 model.dropout=0.1 data.eod=on data.eod_mask=on",
        "model.pattern=*E-E model.experts=4 model.seq_aux_loss=0.1 model.router_z_loss=0.01 "
        "model.shared_ffn=10 model.shared_gate=on model.expert_bias=on",
        "model.pattern=E*-E model.experts=6 model.topk=3 model.router_score=sigmoid "
        "model.router_bias=on model.router_groups=3 model.router_group_topk=2 "
        "model.router_scale=2.5 model.shared_ffn=8 model.router_hash_layers=1",
        "model.pattern=+-+ model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 "
        "model.mla_q_rank=10 model.bias=on model.dropout=0.1 model.attention_dropout=0.3 data.eod=on data.eod_mask=on",
        "model.pattern=+E- model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 "
        "model.experts=4 model.seq_aux_loss=0.1 model.shared_ffn=8",
        /* sparse attention: more tokens than are selected; the loss over all keys and over the selected ones; shared
         * indices; dense below topk */
        "model.pattern=D-D model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 model.mla_q_rank=10 "
        "model.dsa_indexer_n_heads=3 model.dsa_indexer_head_dim=6 model.dsa_indexer_topk=3 "
        "model.dsa_indexer_loss_coeff=0.5 model.bias=on model.dropout=0.1 data.eod=on data.eod_mask=on",
        "model.pattern=DD-D model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 "
        "model.dsa_indexer_n_heads=2 model.dsa_indexer_head_dim=7 model.dsa_indexer_topk=5 "
        "model.dsa_indexer_use_sparse_loss=on model.dsa_indexer_topk_freq=2 model.dsa_indexer_rope_interleaved=on",
        "model.pattern=[D-]E/D- model.mhc_streams=2 model.mhc_gating=0.6 model.mla_kv_rank=12 model.mla_nope=6 "
        "model.mla_rope=4 model.mla_v=5 model.dsa_indexer_n_heads=2 model.dsa_indexer_head_dim=6 "
        "model.dsa_indexer_topk=4 model.dsa_indexer_use_sparse_loss=on model.experts=4 model.mtp_scale=0.4",
        "model.pattern=D-D model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 model.mla_q_rank=10 "
        "model.dsa_indexer_n_heads=3 model.dsa_indexer_head_dim=6 model.dsa_indexer_topk=100",
        /* compressed attention: all three kinds, fewer entries selected than there are; a prediction depth */
        "model.pattern=WC-H model.mla_q_rank=10 model.mla_v=6 model.mla_rope=4 model.csa_window_size=3 "
        "model.compress_rate_csa=2 model.compress_rate_hca=4 model.o_groups=2 model.o_lora_rank=5 "
        "model.dsa_indexer_n_heads=3 model.dsa_indexer_head_dim=6 model.dsa_indexer_topk=2 "
        "model.dsa_indexer_loss_coeff=0.5 model.bias=on model.dropout=0.1 data.eod=on data.eod_mask=on",
        "model.pattern=[C-]H/C- model.mhc_streams=2 model.mhc_gating=0.6 model.mla_q_rank=10 model.mla_v=6 "
        "model.mla_rope=6 model.csa_window_size=20 model.compress_rate_csa=2 model.compress_rate_hca=3 "
        "model.o_groups=3 model.o_lora_rank=5 model.dsa_indexer_n_heads=2 model.dsa_indexer_head_dim=7 "
        "model.dsa_indexer_topk=2 model.dsa_indexer_use_sparse_loss=on model.norm_zero_centered=on model.mtp_scale=0.4",
        "model.pattern=*-/*-/*- model.mtp_scale=0.3",
        /* Hyper-connections over every core, in both profiles. The gating factor is the initial
         * alpha: at its default of 0.01 the mixing matrices are nearly uniform and the gradients of
         * the alphas nearly 0, which would hide errors. */
        "model.pattern=*-*- model.mhc_streams=4 model.mhc_gating=0.8 model.bias=on model.dropout=0.1",
        "model.pattern=M*G- model.mhc_streams=3 model.mhc_profile=s model.mhc_gating=0.9 "
        "model.mhc_iterations=6 model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 "
        "model.mamba_chunk=3 model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 "
        "model.gdn_value_dim=4 model.gdn_chunk=3 model.dropout=0.2 data.eod=on data.eod_mask=on",
        "model.pattern=[*E]-/*E/*E model.mhc_streams=2 model.mhc_gating=0.7 model.experts=4 "
        "model.shared_ffn=8 model.seq_aux_loss=0.1 model.mtp_scale=0.5 model.dropout=0.1 model.tied=off",
        "model.pattern=[+-]E/+- model.mhc_streams=8 model.mhc_profile=s model.mhc_gating=0.6 "
        "model.mhc_iterations=3 model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 "
        "model.experts=4 model.mtp_scale=0.4",
    };
    *n = countof(models);
    return models;
}

/* Tokens of a microbatch: a function of the sample's number, so that batches can
 * be cut in any way. */
struct tiny_batch {
    int32_t *tokens, *labels, *pos, *doc;
};

static inline void tiny_batch_fill(struct tiny_batch *b, const struct config *c, int64_t first_sample, int64_t batch)
{
    int64_t seq = c->train.seq, rows = batch * seq;
    int32_t **all[] = {&b->tokens, &b->labels, &b->pos, &b->doc};
    for (int i = 0; i < countof(all); i++)
        assert_non_null(*all[i] = calloc((size_t)rows, sizeof(int32_t)));
    for (int64_t i = 0; i < rows; i++) {
        int64_t t = i % seq, doc = t >= seq / 3 ? seq / 3 : 0;
        uint64_t at = (uint64_t)((first_sample + i / seq) * seq + t);
        b->tokens[i] = (int32_t)rng_below(7, 2 * at, (uint64_t)c->model.vocab);
        b->labels[i] = at % 7 == 5 ? -1 : (int32_t)rng_below(7, 2 * at + 1, (uint64_t)c->model.vocab);
        b->doc[i] = (int32_t)doc;
        b->pos[i] = (int32_t)(c->data.eod_mask ? t - doc : t);
    }
}

static inline void tiny_batch_release(struct tiny_batch *b)
{
    free(b->tokens);
    free(b->labels);
    free(b->pos);
    free(b->doc);
    *b = (struct tiny_batch){0};
}

/* A model with its train plan, ready to run. */
struct tiny {
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan train;
    struct exec x;
    struct err e;
};

/* The plan's debugging options, as train/ hands them to the executor. */
static inline void tiny_exec(struct exec *x, struct dev *dev, const struct config *c)
{
    exec_init(x, dev);
    x->poison = c->plan.poison;
    x->random_lanes = (uint64_t)c->plan.random_lanes;
    x->find_nan = c->plan.find_nan;
}

static inline void tiny_open(struct tiny *t, const char *options, enum dev_kind kind, int threads)
{
    *t = (struct tiny){0};
    tiny_config(&t->c, options);
    struct model_plan *plans[] = {&t->train};
    struct model_plan_opts o = {.name = "train",
                                .mode = BUILD_TRAIN,
                                .batch = t->c.train.micro_batch,
                                .seq = t->c.train.seq,
                                .want_logits = true};
    assert_ok(dev_open(&t->dev, kind, threads, &t->e), &t->e);
    assert_ok(model_init(&t->m, &t->c, &t->dev, &t->e), &t->e);
    assert_ok(model_plan_build(&t->m, &t->train, &o, &t->e), &t->e);
    assert_ok(model_commit(&t->m, plans, 1, &t->e), &t->e);
    assert_ok(model_init_params(&t->m, &t->e), &t->e);
    /* Frames and workspace may start with anything; a model with nothing to train may need none. */
    static const enum arena_id arenas[] = {ARENA_FRAME, ARENA_WORK, ARENA_HOST};
    for (int i = 0; i < countof(arenas); i++)
        if (t->m.mem.base[arenas[i]] != NULL)
            memset(t->m.mem.base[arenas[i]], 0xFF, (size_t)t->m.mem.allocated[arenas[i]]);
    tiny_exec(&t->x, &t->dev, &t->c);
    assert_ok(exec_prepare(&t->x, &t->train.p, &t->e), &t->e);
}

static inline void tiny_close(struct tiny *t)
{
    exec_release(&t->x);
    model_plan_release(&t->train);
    model_release(&t->m);
    dev_close(&t->dev);
    config_release(&t->c);
}

/* One step's worth of microbatches of the configured size: samples 4 .. 4 + n. */
static inline void tiny_run(struct tiny *t, int64_t n_samples)
{
    int64_t size = t->c.train.micro_batch;
    for (int64_t at = 0; at < n_samples; at += size) {
        struct tiny_batch b;
        tiny_batch_fill(&b, &t->c, 4 + at, size);
        static const double mtp_scale[MTP_MAX_DEPTHS] = {1.0 / 48, 1.0 / 56};
        struct run_info run = {.step = 3,
                               .first_sample = 4 + at,
                               .first_mb = at == 0,
                               .scale = 1.0 / 32,
                               .mtp_scale = mtp_scale,
                               .mb_share = (double)size / (double)n_samples,
                               .tokens = b.tokens,
                               .labels = b.labels,
                               .pos = b.pos,
                               .doc_start = b.doc};
        assert_ok(exec_run(&t->x, &t->train.p, &run, &t->e), &t->e);
        tiny_batch_release(&b);
    }
}

static inline double tiny_loss(const struct tiny *t)
{
    struct tensor loss = model_slot(&t->m, &t->train, t->train.loss);
    return ((const double *)loss.data)[0];
}

#endif
