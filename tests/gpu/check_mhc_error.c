/* The fused boundary is as exact as separate kernels are: for the same bf16 inputs, every output of both ways against
 * the double reference, forward and backward with all parameters' gradients, root mean square errors side by side.
 * Needs a GPU; "N passed, N failed" comes last.
 *
 *   check_mhc_error [SEED]...     default: 5
 *
 * What both ways have in common is large: streams and norms are rounded to bf16 (2^-9 of a value at most), and so is
 * the stream that is projected. Their errors then differ by chance alone: for one input by CHANCE at most, in the mean
 * over all inputs by MARGIN. Outputs that no rounding to bf16 touches have errors of some 1e-7, of fp32 and of the
 * order of sums: below FLOOR, the way fp32 sums and divisions round is no loss of exactness. Gradients of the three
 * scales are one number each, a sum over all rows that cancels in part: SCALAR_FLOOR. The backward pass gets what the
 * forward pass of separate kernels left. */
#include "ops/opcheck.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHANCE 1.25
#define MARGIN 1.05
#define FLOOR 2e-6
#define SCALAR_FLOOR 2e-5

struct input {
    const char *text;
    double w, alpha; /* what the projection and its three scales are multiplied by: logits are about sqrt(K) w alpha */
};

static bool is_input(const struct op_call *c, int i)
{
    enum arg_role role = c->desc->args[i].role;
    return (role == ARG_IN || role == ARG_OPT) && c->t[i].data != NULL;
}
static bool is_output(const struct op_call *c, int i)
{
    enum arg_role role = c->desc->args[i].role;
    return (role == ARG_OUT || role == ARG_OOUT) && c->t[i].data != NULL;
}
static void copy_values(const struct tensor *from, struct tensor *to)
{
    for (int64_t k = 0, n = tensor_elems(to); k < n; k++)
        tensor_set(to, k, tensor_get(from, k));
}
static void scale_values(struct op_call *c, const char *name, double by)
{
    struct tensor *t = &c->t[op_arg_index(c->desc, name)];
    for (int64_t k = 0, n = tensor_elems(t); k < n; k++)
        tensor_set(t, k, by * tensor_get(t, k));
}

/* A call and its memory, on the host. */
struct one {
    struct op_call call;
    struct op_block block;
};
static int one_open(struct one *o, const char *op, const char *text, const struct ops *ops, uint64_t seed,
                    struct err *e)
{
    struct op_sample s = {text};
    *o = (struct one){0};
    TRY(op_call_sample(&o->call, op_find(op), &s, ops, e));
    return op_call_alloc_fast(&o->call, &o->block, seed, e);
}
/* What the device makes of it, in place. */
static int one_run(struct one *o, struct dev *dev, struct err *e)
{
    struct op_call there;
    void *base = NULL;
    struct lane lane = {.dev = dev, .err = e};
    int st = op_send(&o->call, &o->block, dev, &there, &base, e);
    if (st == ST_OK)
        st = op_call_run(ops_for(dev), &lane, &there);
    if (st == ST_OK)
        st = op_fetch(&o->block, dev, base, e);
    if (base != NULL)
        dev->vt->free(dev, base);
    return st;
}
/* The double reference for the inputs that the device gets. */
static int one_exact(struct one *exact, const struct one *like, struct err *e)
{
    struct dev ref = {.kind = DEV_REF, .real = DT_F64, .wide = DT_F64, .n_threads = 1};
    struct lane lane = {.dev = &ref, .err = e};
    for (int i = 0; i < like->call.desc->n_args; i++)
        if (is_input(&like->call, i))
            copy_values(&like->call.t[i], &exact->call.t[i]);
    return op_call_run(&ops_ref, &lane, &exact->call);
}

/* Root mean square of the error, of that of the exact values. */
static double error_of(const struct tensor *got, const struct tensor *want)
{
    double error = 0, value = 0;
    for (int64_t k = 0, n = tensor_elems(want); k < n; k++) {
        double w = tensor_get(want, k), d = tensor_get(got, k) - w;
        error += d * d;
        value += w * w;
    }
    return value > 0 ? sqrt(error / value) : sqrt(error);
}

/* Errors of an output over all inputs: the mean square of fused by separate. */
struct mean {
    const char *op, *way, *name;
    double squares;
    int count;
};
struct counts {
    int passed, failed;
    struct mean means[64];
    int n_means;
};
static void count(struct counts *n, bool ok) { ok ? n->passed++ : n->failed++; }
static void add_to_mean(struct counts *n, const char *op, const char *way, const char *name, double ratio)
{
    int i = 0;
    while (i < n->n_means && (n->means[i].op != op || n->means[i].way != way || n->means[i].name != name))
        i++;
    if (i == n->n_means && i < countof(n->means))
        n->means[n->n_means++] = (struct mean){.op = op, .way = way, .name = name};
    if (i < n->n_means) {
        n->means[i].squares += ratio * ratio;
        n->means[i].count++;
    }
}
static void check_means(struct counts *n)
{
    for (int i = 0; i < n->n_means; i++) {
        const struct mean *m = &n->means[i];
        double ratio = sqrt(m->squares / m->count);
        bool ok = ratio <= MARGIN;
        printf("%s %s%s%s %s: error of the fused way %.3f of the separate kernels', %d inputs\n", ok ? "ok" : "not ok",
               m->op, m->way[0] != '\0' ? " " : "", m->way, m->name, ratio, m->count);
        count(n, ok);
    }
}

static void compare(const struct op_call *separate, const struct op_call *fused, const struct op_call *exact,
                    const char *way, const struct input *in, struct counts *n)
{
    bool ok = true;
    char line[1024] = "";
    size_t at = 0;
    for (int i = 0; i < exact->desc->n_args; i++) {
        if (!is_output(exact, i))
            continue;
        double apart = error_of(&separate->t[i], &exact->t[i]), both = error_of(&fused->t[i], &exact->t[i]);
        bool scalar = tensor_elems(&exact->t[i]) == 1, small = both <= (scalar ? SCALAR_FLOOR : FLOOR),
             worse = !(small || both <= CHANCE * apart);
        ok = ok && !worse;
        if (!scalar)
            add_to_mean(n, exact->desc->name, way, exact->desc->args[i].name, small ? 1 : both / apart);
        at += (size_t)snprintf(line + at, at < sizeof line ? sizeof line - at : 0, "%s %s%s %.2e (%.2e)",
                               at > 0 ? "," : "", worse ? "WORSE " : "", exact->desc->args[i].name, both, apart);
        at = at < sizeof line ? at : sizeof line - 1;
    }
    printf("%s %s [%s%s%s, w %g alpha %g], error fused (separate):%s\n", ok ? "ok" : "not ok", exact->desc->name,
           in->text, way[0] != '\0' ? " " : "", way, in->w, in->alpha, line);
    count(n, ok);
}

/* The backward pass gets what the forward pass had and left. */
static void give_backward(struct op_call *back, const struct op_call *forward)
{
    for (int i = 0; i < back->desc->n_args; i++) {
        int from = op_arg_index(forward->desc, back->desc->args[i].name);
        if (from >= 0 && is_input(back, i) && forward->t[from].data != NULL)
            copy_values(&forward->t[from], &back->t[i]);
    }
}

/* One op: the separate kernels, then every way that is fused. ways end with NULL; "" is the one that is chosen by
 * itself. before: the forward pass, for the backward. */
static int check_op(struct dev *dev, const char *op, const struct input *in, uint64_t seed, const char *const *ways,
                    const struct one *before, struct one *separate, struct counts *n, struct err *e)
{
    struct one exact = {0}, fused = {0};
    const struct ops *ops = ops_for(dev);
    char text[160];
    int st;
    TRY_OUT(one_open(&exact, op, in->text, &ops_ref, seed, e));
    for (int w = -1; ways[w < 0 ? 0 : w] != NULL; w++) {
        struct one *o = w < 0 ? separate : &fused;
        snprintf(text, sizeof text, "%s %s", in->text, w < 0 ? "kernels=2" : ways[w]);
        TRY_OUT(one_open(o, op, text, ops, seed, e));
        scale_values(&o->call, "w", in->w);
        scale_values(&o->call, "a_pre", in->alpha), scale_values(&o->call, "a_post", in->alpha),
            scale_values(&o->call, "a_res", in->alpha);
        if (before != NULL)
            give_backward(&o->call, &before->call);
        if (w < 0)
            TRY_OUT(one_exact(&exact, o, e));
        TRY_OUT(one_run(o, dev, e));
        if (w >= 0) {
            compare(&separate->call, &fused.call, &exact.call, ways[w], in, n);
            op_call_free(&fused.block);
        }
    }
out:
    op_call_free(&exact.block);
    op_call_free(&fused.block);
    return st;
}

static void check(struct dev *dev, const struct input *in, uint64_t seed, struct counts *n)
{
    static const char *const forward[] = {"", NULL}, *const backward[] = {"", "products=1", NULL};
    struct err e = {0};
    struct one ahead = {0}, back = {0};
    struct input plain = *in;
    char text[128];
    if (check_op(dev, "mhc_boundary_fwd", in, seed, forward, NULL, &ahead, n, &e) == ST_OK) {
        snprintf(text, sizeof text, "%s no_dbias=1", in->text);
        plain.text = text;
        check_op(dev, "mhc_boundary_bwd", &plain, seed, backward, &ahead, &back, n, &e);
    }
    if (e.msg[0] != '\0') {
        printf("not ok %s: %s\n", in->text, e.msg);
        n->failed++;
    }
    op_call_free(&ahead.block);
    op_call_free(&back.block);
}

int main(int argc, char **argv)
{
    /* Gates near the middle of their range, as training begins; over all of it; and at its ends, where few logits
     * decide. A block of channels, several, with parts of tiles; both profiles. */
    static const struct input inputs[] = {
        {"rows=300 d=256 no_bias=1", 0.02, 0.1}, {"rows=300 d=256 no_bias=1 profile=1", 0.1, 1},
        {"rows=300 d=256 no_bias=1", 0.3, 1},    {"rows=137 d=2048 no_bias=1", 0.01, 0.1},
        {"rows=137 d=2048 no_bias=1", 0.03, 1},  {"rows=137 d=2048 no_bias=1 profile=1", 0.1, 1},
        {"rows=257 d=4096 no_bias=1", 0.02, 1},  {"rows=60 d=7168 no_bias=1", 0.02, 1},
        {"rows=200 d=192 no_bias=1", 0.05, 1},
    };
    struct counts n = {0};
    struct err e = {0};
    struct dev dev;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (dev_open_gpu(&dev, &(struct dev_gpu){.fp32 = false}, 1, &e) != ST_OK) {
        printf("not ok no GPU: %s\n0 passed, 1 failed\n", e.msg);
        return 1;
    }
    for (int s = 0; s < (argc > 1 ? argc - 1 : 1); s++)
        for (int i = 0; i < countof(inputs); i++)
            check(&dev, &inputs[i], argc > 1 ? strtoull(argv[1 + s], NULL, 10) : 5, &n);
    dev_close(&dev);
    check_means(&n);
    printf("%d passed, %d failed\n", n.passed, n.failed);
    return n.failed != 0;
}
