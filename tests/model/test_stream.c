/* The residual stream in fp32 beside layers of bf16 (model.fp32_residual). A GPU on paper says which slots get which
 * type: the stream and its gradient are wide from the embedding over every joint and pipeline cut to the last norm,
 * and nothing else is. Every op call of these graphs is checked as it is declared. The numbers are checked by the ops'
 * samples with wide_ settings (tests/ops, tests/emu, tests/gpu). Where activations are not narrower, the option
 * changes no bit. */
#include "layers/layer.h"
#include "tiny.h"

static const char *const models[] = {
    "model.pattern=*-*-",
    "model.pattern=*-*- model.dropout=0.1",
    "model.pattern=*-*- model.norm=layer model.position=learned model.max_position=64 model.bias=on model.dropout=0.1",
    "model.pattern=*-*- model.norm=layer model.position=learned model.max_position=64",
    "model.pattern=*E-/*E/*E model.experts=4 model.shared_ffn=8",
    "model.pattern=*-/*- model.norm=layer model.dropout=0.1",
    "model.pattern=|*-||*-/*- model.dropout=0.1",
    "model.pattern=|*-||*-",
};

/* Host tables, but the types of a GPU: nothing runs. */
struct paper {
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan mp;
    struct err e;
};

static void paper_open(struct paper *p, const char *options, bool on, const char *more, enum build_mode mode)
{
    char text[512];
    *p = (struct paper){.dev = {.kind = DEV_CPU, .real = DT_BF16, .wide = DT_F32, .n_threads = 1}};
    snprintf(text, sizeof text, "%s model.fp32_residual=%s %s", options, on ? "on" : "off", more);
    tiny_config(&p->c, text);
    assert_ok(model_init(&p->m, &p->c, &p->dev, &p->e), &p->e);
    for (const char *s = p->c.model.pattern; *s != '\0'; s++)
        p->m.mesh.vpp += *s == '|';
    struct model_plan_opts o = {.name = "paper", .mode = mode, .batch = p->c.train.micro_batch, .seq = p->c.train.seq};
    o.cache_len = mode == BUILD_DECODE ? o.seq : 0;
    assert_ok(model_plan_build(&p->m, &p->mp, &o, &p->e), &p->e);
}

static void paper_close(struct paper *p)
{
    model_plan_release(&p->mp);
    model_release(&p->m);
    config_release(&p->c);
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? dot + 1 : name;
}

/* The stream is what joints, cuts, the embedding and depths add to, and the gradients of that. */
static bool is_stream(const struct slot *s)
{
    const char *last = last_part(s->name);
    return strcmp(last, "stream") == 0 || strcmp(last, "dstream") == 0 || strcmp(s->name, "embed.de") == 0;
}

/* What layers see of a joint: normed inputs, outputs and their gradients. */
static bool is_layers(const struct slot *s)
{
    static const char *const names[] = {"norm", "dnorm", "df", "e", "masked", "cat", "dcat", "x", "dx", "qkv", "o"};
    for (int i = 0; i < countof(names); i++)
        if (strcmp(last_part(s->name), names[i]) == 0)
            return true;
    return false;
}

struct counts {
    int streams, layers, df;
    int64_t stream_bytes;
};

static struct counts check_types(const struct paper *p, enum dtype stream)
{
    struct counts n = {0};
    for (int i = 0; i < p->mp.g.n_slots; i++) {
        const struct slot *s = &p->mp.g.slots[i];
        if (s->arena >= 0)
            continue;
        if (is_stream(s) && s->shape.dtype != stream)
            fail_msg("%s: %s is %s, not %s", p->c.model.pattern, s->name, dtype_name(s->shape.dtype),
                     dtype_name(stream));
        if (is_layers(s) && s->shape.dtype != DT_BF16)
            fail_msg("%s: %s is %s, not bf16", p->c.model.pattern, s->name, dtype_name(s->shape.dtype));
        n.streams += is_stream(s);
        n.stream_bytes += is_stream(s) ? tensor_bytes(&s->shape) : 0;
        n.layers += is_layers(s);
        n.df += strcmp(last_part(s->name), "df") == 0;
    }
    return n;
}

static void the_stream_is_wide_and_nothing_else(void **state)
{
    (void)state;
    static const char *const policies[] = {"", "plan.recompute=full", "plan.recompute=norm plan.delay_dw=on",
                                           "gpu.precision=fp8 model.hidden=128 model.ffn=128"};
    for (int i = 0; i < countof(models); i++)
        for (int k = 0; k < countof(policies); k++) {
            struct paper off, on;
            paper_open(&off, models[i], false, policies[k], BUILD_TRAIN);
            paper_open(&on, models[i], true, policies[k], BUILD_TRAIN);
            struct counts before = check_types(&off, DT_BF16), after = check_types(&on, DT_F32);
            int layers = (int)strcspn(off.c.model.pattern, "/"), cuts = 0;
            for (int c = 0; c < (int)strcspn(off.c.model.pattern, "/"); c++)
                cuts += off.c.model.pattern[c] == '|';
            assert_true(after.streams >= 2 * (layers - cuts) && after.layers > 0);
            assert_true(after.streams > before.streams); /* the embedding's output is one now */
            assert_true(after.stream_bytes > 2 * before.stream_bytes);
            assert_true(after.df >= layers - cuts); /* never the gradient of the stream itself */
            paper_close(&off);
            paper_close(&on);
        }
}

/* Evaluation and generation keep it, too: they compute what training does. */
static void plans_without_a_backward_half_have_it(void **state)
{
    (void)state;
    static const enum build_mode modes[] = {BUILD_EVAL, BUILD_DECODE};
    for (int k = 0; k < countof(modes); k++) {
        struct paper p;
        paper_open(&p, "model.pattern=*-*-", true, "", modes[k]);
        assert_int_equal(check_types(&p, DT_F32).streams, 5); /* the embedding's, and one behind each layer */
        paper_close(&p);
    }
}

/* A tensor of a message has the type of its slot on both sides. */
static void cuts_send_the_wide_stream(void **state)
{
    (void)state;
    struct paper p;
    int messages = 0;
    paper_open(&p, "model.pattern=|*-||*-", true, "", BUILD_TRAIN);
    for (int i = 0; i < p.mp.g.n_nodes; i++) {
        const struct node *n = &p.mp.g.nodes[i];
        for (int ph = PH_FWD; n->lane == LANE_COMM && ph <= PH_BWD; ph++)
            for (int u = 0; u < n->phase[ph].n_uses; u++) {
                if (n->phase[ph].use[u].slot == NO_SLOT) /* what only hyper-connections carry along */
                    continue;
                assert_int_equal(p.mp.g.slots[n->phase[ph].use[u].slot].shape.dtype, DT_F32);
                messages++;
            }
    }
    assert_int_equal(messages, 3 * 2 * 2); /* cuts, ends of each, directions */
    paper_close(&p);
}

static void the_plan_pays_for_it(void **state)
{
    (void)state;
    struct paper off, on;
    paper_open(&off, "model.pattern=*-*-*-*- model.hidden=64", false, "", BUILD_TRAIN);
    paper_open(&on, "model.pattern=*-*-*-*- model.hidden=64", true, "", BUILD_TRAIN);
    /* Nine streams are kept for the backward half, two bytes more for each number. */
    int64_t more = 9 * 2 * off.c.train.micro_batch * off.c.train.seq * off.c.model.hidden;
    assert_int_equal(on.m.mem.planned[ARENA_FRAME] - off.m.mem.planned[ARENA_FRAME], more);
    paper_close(&off);
    paper_close(&on);
}

static void wider_devices_ignore_it(void **state)
{
    (void)state;
    for (int i = 0; i < countof(models); i++)
        for (enum dev_kind kind = DEV_REF; kind <= DEV_CPU; kind++) {
            struct tiny t[2];
            char options[512];
            if (strchr(models[i], '|') != NULL) /* a plan of several chunks is run by tests of pipelines */
                continue;
            for (int k = 0; k < 2; k++) {
                snprintf(options, sizeof options, "%s model.fp32_residual=%s", models[i], k == 0 ? "off" : "on");
                tiny_open(&t[k], options, kind, 1);
                tiny_run(&t[k], 4);
            }
            assert_int_equal(t[0].train.g.n_slots, t[1].train.g.n_slots);
            assert_true(tiny_loss(&t[0]) == tiny_loss(&t[1]));
            for (int p = 0; p < t[0].m.params.n; p++) {
                struct tensor a = model_grad(&t[0].m, p), b = model_grad(&t[1].m, p);
                assert_memory_equal(a.data, b.data, (size_t)tensor_bytes(&a));
            }
            tiny_close(&t[0]);
            tiny_close(&t[1]);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_stream_is_wide_and_nothing_else),
        cmocka_unit_test(plans_without_a_backward_half_have_it),
        cmocka_unit_test(cuts_send_the_wide_stream),
        cmocka_unit_test(the_plan_pays_for_it),
        cmocka_unit_test(wider_devices_ignore_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
