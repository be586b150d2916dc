/* train/: activations and optimizer state in host memory change nothing that is trained: parameters and moments after
 * 20 steps, for every layer kind, with hyper-connections of both profiles, recomputed blocks and multi-token
 * prediction, on both devices of the host. */
#include "run.h"

enum { STEPS = 20 };

#define SIZES                                                                                                          \
    "model.hidden=16 model.heads=2 model.ffn=12 model.experts=4 model.mtp_scale=0.3 "                                  \
    "model.mamba_head_dim=8 model.mamba_state=4 model.mamba_groups=1 model.mamba_chunk=4 "                             \
    "model.gdn_value_heads=2 model.gdn_key_heads=1 model.gdn_key_dim=4 model.gdn_value_dim=4 model.gdn_chunk=4 "       \
    "model.mla_kv_rank=8 model.mla_nope=4 model.mla_rope=2 model.mla_v=4 train.micro_batch=1 train.global_batch=2 "    \
    "model.dsa_indexer_n_heads=2 model.dsa_indexer_head_dim=4 model.dsa_indexer_topk=2 model.csa_window_size=3 "       \
    "model.compress_rate_csa=2 model.compress_rate_hca=4 model.o_groups=2 model.o_lora_rank=4 "                        \
    "train.seq=8 model.dropout=0.1 "

#define LATENT " model.mla_q_rank=6"
#define MHC " model.mhc_gating=0.5 model.mhc_iterations=5"

struct trained {
    double loss[STEPS];
    struct snapshot after;
    int64_t device, host;
    int fetches;
};

static void train(struct trained *r, const struct playground *pg, const char *model, const char *policy,
                  const char *device)
{
    char options[1536];
    struct config c;
    struct trainer t;
    struct err e = {0};
    snprintf(options, sizeof options, SIZES "%s %s run.device=%s", model, policy, device);
    run_config(&c, pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, STEPS, r->loss);
    snapshot_take(&r->after, &t);
    r->device = t.train.p.frame_bytes + t.train.p.work_bytes;
    r->host = t.model.mem.allocated[ARENA_HOST];
    r->fetches = t.train.p.n_fetches;
    assert_int_equal(r->host, t.train.p.host_bytes);
    trainer_close(&t);
    config_release(&c);
}

static void compare(const struct playground *pg, const char *model, const char *with, const char *device)
{
    struct trained off, on;
    char policy[256];
    snprintf(policy, sizeof policy, "%s plan.offload=* plan.offload_min=0", with);
    train(&off, pg, model, "", device);
    train(&on, pg, model, policy, device);
    if (memcmp(off.loss, on.loss, sizeof off.loss) != 0 || !snapshot_equal(&off.after, &on.after))
        fail_msg("%s: %s %s changes what is trained", device, model, policy);
    if (off.fetches != 0 || off.host != 0 || on.fetches == 0 || on.host == 0 || on.device >= off.device)
        fail_msg("%s: %s %s: %d copies, %lld bytes on the host, %lld instead of %lld on the device", device, model,
                 policy, on.fetches, (long long)on.host, (long long)on.device, (long long)off.device);
    snapshot_free(&off.after);
    snapshot_free(&on.after);
}

static void offload_changes_nothing_that_is_trained(void **state)
{
    (void)state;
    static const char *const patterns[] = {"*-*-",
                                           "M-M-",
                                           "G-G-",
                                           "+-+-",
                                           "*E*E",
                                           "*-*-/*-",
                                           "[*-][M-][*E]",
                                           "D-D-",
                                           "DE-/DE",
                                           "W-C- model.mla_q_rank=6",
                                           "[CE][H-]/WE model.mla_q_rank=6"};
    static const char *const streams[] = {"", "model.mhc_streams=2" MHC, "model.mhc_streams=4" MHC,
                                          "model.mhc_streams=2 model.mhc_profile=s" MHC,
                                          "model.mhc_streams=4 model.mhc_profile=s" MHC};
    static const char *const devices[] = {"cpu", "ref"};
    struct playground pg;
    char model[256];
    playground_open(&pg);
    for (int p = 0; p < countof(patterns); p++)
        for (int s = 0; s < countof(streams); s++)
            for (int d = 0; d < countof(devices); d++) {
                snprintf(model, sizeof model, "model.pattern=%s %s", patterns[p], streams[s]);
                compare(&pg, model, "", devices[d]);
                if (s > 0)
                    compare(&pg, model, (s + d) % 2 ? "plan.recompute_block=2" : "plan.recompute=norm", devices[d]);
            }
    playground_close(&pg);
}

static void refused(const char *options, const char *says)
{
    struct config c;
    struct trainer t = {0};
    struct playground pg;
    struct err e = {0};
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_fails(trainer_open(&t, &c, NULL, true, &e), ST_USAGE, &e, says);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

static void lists_that_mean_nothing_are_refused(void **state)
{
    (void)state;
    refused("plan.offload=mamba.y", "'mamba.y' names no slot of this model");
    refused("plan.offload=expert_fc1", "'expert_fc1' names no slot of this model");
    refused("plan.offload=attn.o:0", "number of layers of at least 1");
    refused("plan.offload=*", "fewer than plan.offload_min=1048576 elements");
    refused("plan.offload=joint.norm plan.offload_min=0 plan.recompute=norm", "are recomputed");
    refused("plan.offload=joint.dstream plan.offload_min=0", "moves nothing");
}

/* Megatron's names reach the slots that its modules keep. */
static void names_of_modules_are_known(void **state)
{
    (void)state;
    static const struct {
        const char *name, *pattern;
        int slots;
    } rows[] = {{"attn_norm", "*-*-", 2},        {"mlp_norm", "*-*-", 2},         {"mlp_norm", "*E*-", 2},
                {"qkv_linear", "*-*-", 2},       {"core_attn", "*-*-", 4},        {"attn_proj", "*-*-", 2},
                {"attn_proj", "+-+-", 2},        {"moe_act", "*E*E", 2},          {"expert_fc1", "*E*-", 1},
                {"attn_norm:1", "*-*-", 1},      {"attn_norm", "D-W-" LATENT, 2}, {"qkv_linear", "D-W-" LATENT, 2},
                {"attn_proj", "D-W-" LATENT, 2}, {"core_attn", "D-" LATENT, 5},   {"core_attn", "C-" LATENT, 3},
                {"core_attn", "W-" LATENT, 3}};
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(rows); i++) {
        struct config c;
        struct trainer t = {0};
        struct err e = {0};
        char options[1536];
        snprintf(options, sizeof options,
                 SIZES "model.mhc_streams=2 model.pattern=%s plan.offload=%s plan.offload_min=0", rows[i].pattern,
                 rows[i].name);
        run_config(&c, &pg, options);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        if (t.train.p.n_fetches != rows[i].slots)
            fail_msg("%s in %s: %d slots", rows[i].name, rows[i].pattern, t.train.p.n_fetches);
        trainer_close(&t);
        config_release(&c);
    }
    playground_close(&pg);
}

/* ---- state of the optimizer ------------------------------------------------------------------ */

/* Moments in host memory pass through buckets of the device, and come back as they would be. */
static void optimizer_state_on_the_host_changes_nothing(void **state)
{
    (void)state;
    static const char *const models[] = {"model.pattern=*-*-", "model.pattern=*E*E model.tied=off",
                                         "model.pattern=*-M- model.mhc_streams=2 train.clip=0.01",
                                         "model.pattern=*-*- model.ffn=32 gpu.precision=fp8"};
    static const char *const devices[] = {"cpu", "ref"};
    struct playground pg;
    playground_open(&pg);
    for (int k = 0; k < countof(models); k++)
        for (int d = 0; d < countof(devices); d++)
            for (int all = 0; all < 2; all++) {
                struct trained off, on;
                train(&off, &pg, models[k], "", devices[d]);
                train(&on, &pg, models[k],
                      all ? "optim.offload=all plan.random_lanes=3 plan.poison=on"
                          : "optim.offload=moments optim.overlap=off",
                      devices[d]);
                if (memcmp(off.loss, on.loss, sizeof off.loss) != 0 || !snapshot_equal(&off.after, &on.after))
                    fail_msg("%s on %s: the state on the host gives other parameters", models[k], devices[d]);
                snapshot_free(&off.after);
                snapshot_free(&on.after);
            }
    playground_close(&pg);
}

static void the_update_needs_the_memory_of_a_few_buckets(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct trainer t = {0};
    struct err e = {0};
    playground_open(&pg);
    run_config(&c, &pg, SIZES "model.pattern=*-*-*-*- model.vocab=400 optim.offload=all");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    const struct memory *m = &t.model.mem;
    assert_true(memory_on_host(m, ARENA_OPTIM));
    assert_int_equal(memory_total(m, m->allocated, true), m->allocated[ARENA_OPTIM]);
    assert_true(t.optim.n_buckets >= 6);
    assert_true(t.optim.apply.work_bytes > 0 && 2 * t.optim.apply.work_bytes < m->allocated[ARENA_OPTIM]);
    /* Beside training the buckets take no more than these three. */
    assert_true(t.optim.beside.work_bytes <= t.train.p.work_bytes + t.optim.apply.work_bytes);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offload_changes_nothing_that_is_trained),
        cmocka_unit_test(lists_that_mean_nothing_are_refused),
        cmocka_unit_test(names_of_modules_are_known),
        cmocka_unit_test(optimizer_state_on_the_host_changes_nothing),
        cmocka_unit_test(the_update_needs_the_memory_of_a_few_buckets),
    };
    return cmocka_run_group_tests_name("train: offload", tests, NULL, NULL);
}
