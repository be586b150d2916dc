/* braid plan: what a config would do, without doing it. */
#include "cmd/cmd.h"
#include "sim/timeline.h"

static const char usage[] =
    "usage: braid plan [FILE.ini] [--section.key=value ...] [--steps=on] [--params=on]\n\n"
    "Prints the stack, parameters, FLOPs, every arena and the memory of each layer; with --steps=on every step with "
    "its\n"
    "lane, waits and addresses, with --params=on every parameter. Nothing is allocated; training allocates exactly "
    "this.\n"
    "With --parallel.ranks=N the plan is that of rank 0, followed by the memory of each rank (of each stage, when "
    "there are many).\n\n"
    "       braid plan [FILE.ini] --timeline=OUT.svg|OUT.json [--measure=on] [MACHINE]      the schedule of all ranks\n"
    "       braid plan [FILE.ini] --predict=default|64:4x2x16,64:tp8.pp4,... [MACHINE]      a table of steps on such "
    "meshes:\n"
    "             GPUS:PPxVPPxEP, or words of pp vpp ep tp cp etp zero\n"
    "       braid plan [FILE.ini] --search --gpus=64 [--memory=80] [--tokens=1T] [MACHINE]  the best meshes and "
    "policies "
    "for so many GPUs\n"
    "MACHINE: --flops=620 --attention=N (TFLOP/s; rates by length if not given) --bandwidth=4 (TB/s) --link_gbps=45 "
    "--link_us=15 (to other "
    "machines, GB/s of each GPU)\n"
    "         --node_gbps=370 --node_gpus=8 (within a machine) --beside=0.12 (share by which computing is slower "
    "beside a busy link) --memory=141 (GB) --host_gbps=55 (to host memory)\n"
    "Times are predicted from these numbers; with --measure=on those of computing are measured here, on one rank with "
    "the whole model.\n";
static const char own_options[] =
    "model.pattern model.layers model.hidden model.heads model.ffn train.seq train.micro_batch "
    "train.global_batch plan.recompute plan.recompute_block run.device parallel.ranks parallel.pp "
    "parallel.vpp parallel.ep parallel.etp";

static void totals(const struct trainer *t, struct buf *out)
{
    const struct config *c = t->cfg;
    char a[32], b[32], d[32];
    double per_token = 3 * model_flops_per_token(c, &t->model.pattern, c->train.seq);
    double tokens = (double)(c->train.global_batch * c->train.seq);
    buf_addf(out,
             "step: %lld tokens (%lld microbatches of %lld x %lld), %sFLOP per token, %sFLOP per step, %sFLOP for all "
             "%lld steps\n",
             (long long)tokens, (long long)t->n_micro, (long long)c->train.micro_batch, (long long)c->train.seq,
             human_count(per_token, a, sizeof a), human_count(per_token * tokens, b, sizeof b),
             human_count(per_token * tokens * (double)c->train.steps, d, sizeof d), (long long)c->train.steps);
    buf_addf(out,
             "      (Megatron's count: 3 x forward, causal half of attention; the plan's own steps, replays included: "
             "%sFLOP)\n",
             human_count(plan_flops(&t->train.p) * (double)(t->n_micro / t->train.n_micro), a, sizeof a));
}

/* Bytes of rows that leave this rank for experts and come back, of each layer and microbatch. */
static void exchanged(const struct trainer *t, struct buf *out)
{
    const struct graph *g = &t->train.g;
    const struct mesh *m = &t->model.mesh;
    const struct step_cost cost = step_cost_of(&(struct machine){0}, NULL, t);
    double bytes[2][2] = {{0}};
    int layers = 0;
    for (int i = 0; i < g->n_nodes; i++) {
        enum node_role role = g->nodes[i].role;
        if (role != ROLE_DISPATCH && role != ROLE_COMBINE)
            continue;
        layers += role == ROLE_DISPATCH;
        bytes[role == ROLE_COMBINE][0] = g->nodes[i].phase[PH_FWD].bytes;
        bytes[role == ROLE_COMBINE][1] = g->nodes[i].phase[PH_BWD].bytes;
    }
    if (layers == 0 || cost.places == 0)
        return;
    char text[4][32];
    for (int i = 0; i < 4; i++)
        human_bytes(bytes[i / 2][i % 2], text[i], sizeof text[i]);
    double filled = cost.filled * (double)cost.places,
           choices = cost.rows_filled * (double)cost.rows / m->etp; /* of this rank's tokens */
    buf_addf(out,
             "rows of experts, each of %d layers and microbatches: buffers of %s there (%s their gradients), %s back "
             "(%s); %lld rows, of which\n"
             "      an even routing fills %.0f, where a row for each expert would be %.0f\n",
             layers, text[0], text[1], text[2], text[3], (long long)cost.places, filled, choices);
}

/* Arenas of one rank in a line. */
static int rank_line(const struct config *c, int rank, struct fullest_rank *fullest, struct buf *out, struct err *e)
{
    struct rank_place place;
    struct trainer t = {0};
    TRY(place_on_paper(&place, c, rank, e));
    int st = trainer_plan_on(&t, c, &place, true, e);
    int64_t total = memory_total(&t.model.mem, t.model.mem.planned, false);
    char text[32];
    const struct mesh *m = &place.mesh;
    buf_addf(out, "%4d %5d %5d %5d %5d %5d", rank, m->pp_rank, m->dp_rank, m->cp_rank, m->tp_rank, m->ep_rank);
    if (m->etp > 1)
        buf_addf(out, " %5d", m->etp_rank);
    for (int a = 0; st == ST_OK && a < ARENA_ALL; a++)
        buf_addf(out, " %11s", human_bytes((double)t.model.mem.planned[a], text, sizeof text));
    buf_addf(out, " %11s\n", human_bytes((double)total, text, sizeof text));
    if (st == ST_OK && total > fullest->device)
        *fullest = (struct fullest_rank){
            .rank = rank, .device = total, .host = memory_total(&t.model.mem, t.model.mem.planned, true)};
    trainer_close(&t);
    return st;
}

/* All ranks, or when there are many the first of each stage: the others have as much or a little less. */
static int all_ranks(const struct config *c, const struct mesh *m, struct fullest_rank *fullest, struct buf *out,
                     struct err *e)
{
    enum { FEW = 16 };
    int step = m->world <= FEW ? 1 : m->stage;
    char mesh[160];
    buf_addf(out, "\n%d ranks: %s\n%4s %5s %5s %5s %5s %5s", m->world, mesh_text(m, mesh, sizeof mesh), "rank", "stage",
             "data", "ctx", "tens", "exp.");
    if (m->etp > 1)
        buf_addf(out, " %5s", "slice");
    for (int a = 0; a < ARENA_ALL; a++)
        buf_addf(out, " %11s", arena_name((enum arena_id)a));
    buf_addf(out, " %11s\n", "total");
    for (int rank = 0; rank < m->world; rank += step)
        TRY(rank_line(c, rank, fullest, out, e));
    return ST_OK;
}

/* What rank 0 has: layers, exchanges, kernels, memory, and parameters and steps where they are wanted. */
static int describe(const struct config *c, const struct trainer *t, bool params, bool steps,
                    struct fullest_rank *fullest, struct buf *out, struct err *e)
{
    const struct plan *update = t->optim.beside.name != NULL ? &t->optim.beside : &t->optim.apply;
    model_print_stack(&t->model, out);
    totals(t, out);
    exchanged(t, out);
    model_print_kernels(c, &t->dev, out);
    optim_print(&t->optim, &t->model, out);
    TRY(groups_print(&t->model, out, e));
    buf_add(out, "\n");
    memory_print(&t->model.mem, out);
    buf_add(out, "\n");
    plan_print_memory(&t->train.p, out);
    plan_print_memory(&t->eval.p, out);
    plan_print_memory(&t->optim.p, out);
    if (t->optim.n_buckets > 0)
        plan_print_memory(update, out);
    if (t->model.mesh.world > 1)
        TRY(all_ranks(c, &t->model.mesh, fullest, out, e));
    if (params) {
        buf_add(out, "\n");
        model_print_params(&t->model, out);
    }
    if (steps) {
        buf_add(out, "\n");
        plan_print_steps(&t->train.p, out);
        plan_print_steps(&t->optim.p, out);
        if (t->optim.n_buckets > 0)
            plan_print_steps(update, out);
    }
    return ST_OK;
}

static int run(struct config *c, int argc, char **argv, struct trainer *t, struct err *e)
{
    struct config_extra extra[] = {
        {.name = "steps"},     {.name = "params"},  {.name = "timeline"},  {.name = "predict"},
        {.name = "measure"},   {.name = "flops"},   {.name = "attention"}, {.name = "bandwidth"},
        {.name = "link_gbps"}, {.name = "link_us"}, {.name = "node_gbps"}, {.name = "node_gpus"},
        {.name = "beside"},    {.name = "memory"},  {.name = "host_gbps"}, {.name = "search", .alone = "on"},
        {.name = "gpus"},      {.name = "tokens"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    bool steps = false, params = false, search = false;
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    if ((extra[0].value && !parse_bool(extra[0].value, &steps)) ||
        (extra[1].value && !parse_bool(extra[1].value, &params)))
        return err_set(e, ST_USAGE, "--steps and --params take on or off");
    TRY(cmd_finish(c, e));
    cmd_say_unused(c);
    const struct timeline_words w = {extra[2].value,  extra[3].value,  extra[4].value,  extra[5].value,
                                     extra[6].value,  extra[7].value,  extra[8].value,  extra[9].value,
                                     extra[10].value, extra[11].value, extra[12].value, extra[13].value,
                                     extra[14].value, extra[16].value, extra[17].value};
    if (extra[15].value != NULL && !parse_bool(extra[15].value, &search))
        return err_set(e, ST_USAGE, "--search takes on or off");
    if (!search && (w.gpus != NULL || w.tokens != NULL))
        return err_set(e, ST_USAGE, "--gpus and --tokens belong to --search");
    if (search)
        return plan_search(c, &w, e);
    if (extra[2].value != NULL || extra[3].value != NULL)
        return plan_timeline(c, &w, e);
    struct rank_place place;
    struct buf out;
    buf_init(&out, 0);
    int st = cmd_fit(c, 1, &out, e);
    if (st == ST_OK)
        st = place_on_paper(&place, c, 0, e);
    if (st == ST_OK)
        st = trainer_plan_on(t, c, &place, true, e);
    struct fullest_rank fullest = {.device = memory_total(&t->model.mem, t->model.mem.planned, false),
                                   .host = memory_total(&t->model.mem, t->model.mem.planned, true)};
    if (st == ST_OK)
        st = describe(c, t, params, steps, &fullest, &out, e);
    if (st == ST_OK)
        st = plan_verdict(c, extra[13].value, t, &fullest, &out, e);
    if (st == ST_OK)
        st = buf_check(&out, e);
    if (st == ST_OK)
        fputs(out.text, stdout);
    buf_release(&out);
    return st;
}

int cmd_plan(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct config c = {0};
    struct trainer t = {0};
    struct err e = {0};
    int code = cmd_exit(run(&c, argc, argv, &t, &e), &e);
    trainer_close(&t);
    config_release(&c);
    return code;
}
