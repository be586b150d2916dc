/* braid op: one op on tensors from a file, so that anyone can compare it with anything. */
#include "cmd/cmd.h"
#include "ops/opguard.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid op NAME --in=A.safetensors --out=B.safetensors [--dev=ref|cpu|cuda|cuda-fp32] [attribute=value ...]\n"
    "       braid op list            all ops\n"
    "       braid op NAME            tensors and attributes of one\n\n"
    "Inputs are found in the file by name; an optional one that is not there is absent. Reals are converted to the\n"
    "device's type. Outputs that an acc_ attribute adds to are read from the input file too.\n";

static const char *role_text(enum arg_role r)
{
    static const char *const text[] = {"input", "output", "optional input", "optional output", "scratch"};
    return text[r];
}

static void list_ops(void)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        printf("%-16s %s\n", all[i]->name, all[i]->summary);
}

static void describe(const struct op_desc *d)
{
    printf("%s: %s\n", d->name, d->summary);
    for (int i = 0; i < d->n_args; i++)
        if (d->args[i].role != ARG_WORK)
            printf("  tensor    %-12s %s\n", d->args[i].name, role_text(d->args[i].role));
    for (int i = 0; i < d->n_attrs; i++)
        printf("  attribute %-12s default %g\n", d->attrs[i].name, d->attrs[i].value);
    for (int i = 0; i < d->n_args; i++)
        if (d->args[i].acc_at != 0)
            printf("  attribute acc_%-8s default 0\n", d->args[i].name);
    for (int i = 0; i < d->n_args; i++)
        if (d->args[i].type == ARG_STREAM)
            printf("  attribute wide_%-7s default 0\n", d->args[i].name);
}

static int read_inputs(struct op_call *c, const struct st_file *in, const struct ops *ops, struct err *e)
{
    for (int i = 0; i < c->desc->n_args; i++) {
        const struct op_arg *a = &c->desc->args[i];
        const struct st_entry *entry = st_find(in, a->name);
        if (a->role != ARG_IN && a->role != ARG_OPT)
            continue;
        if (entry == NULL && a->role == ARG_IN)
            return err_set(e, ST_INVALID, "%s: the input file holds no tensor '%s'", c->desc->name, a->name);
        if (entry != NULL)
            c->t[i] = tensor_shape(op_call_dtype(c, i, ops->real), entry->view.rank, entry->view.dim);
    }
    return ST_OK;
}

/* Sizes follow from the file: more than there is memory is refused before it is touched. */
static int check_sizes(const struct op_call *c, struct err *e)
{
    int64_t bytes, pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    char want[32], have[32];
    TRY(op_guard_sizes(c, &bytes, e));
    if (pages <= 0 || page <= 0 || bytes / page <= pages)
        return ST_OK;
    return err_set(e, ST_NOMEM, "%s: the tensors of this call take %s, the machine has %s", c->desc->name,
                   human_bytes((double)bytes, want, sizeof want),
                   human_bytes((double)pages * (double)page, have, sizeof have));
}

static int allocate(struct op_call *c, const struct st_file *in, struct err *e)
{
    for (int i = 0; i < c->desc->n_args; i++) {
        struct tensor *t = &c->t[i];
        if (t->rank == 0)
            continue;
        TRY(mem_aligned(&t->data, (size_t)tensor_bytes(t), DEV_ALIGN, e));
        memset(t->data, 0, (size_t)tensor_bytes(t));
        const struct st_entry *entry = st_find(in, c->desc->args[i].name);
        if (entry != NULL && c->desc->args[i].role != ARG_WORK)
            TRY(st_read(entry, t, e));
    }
    return ST_OK;
}

static int write_outputs(const struct op_call *c, const char *path, struct err *e)
{
    struct st_item items[OP_MAX_ARGS];
    int n = 0;
    for (int i = 0; i < c->desc->n_args; i++) {
        enum arg_role role = c->desc->args[i].role;
        if ((role == ARG_OUT || role == ARG_OOUT) && c->t[i].data != NULL)
            items[n++] = (struct st_item){.name = c->desc->args[i].name, .host = c->t[i]};
    }
    return st_write_file(path, items, n, NULL, 0, e);
}

static int set_attributes(struct op_call *c, const struct config_args *args, struct err *e)
{
    for (int i = 1; i < args->n_positional; i++) {
        char name[64];
        const char *eq = strchr(args->positional[i], '=');
        double value;
        if (eq == NULL || (size_t)(eq - args->positional[i]) >= sizeof name || !parse_f64(eq + 1, &value))
            return err_set(e, ST_USAGE, "'%s' is not attribute=number", args->positional[i]);
        snprintf(name, sizeof name, "%.*s", (int)(eq - args->positional[i]), args->positional[i]);
        if (!op_call_set(c, name, value)) {
            err_set(e, ST_USAGE, "op %s has no attribute '%s'", c->desc->name, name);
            return err_hint(e, "`braid op %s` lists them", c->desc->name);
        }
    }
    return ST_OK;
}

/* On a GPU: tensors go there one by one, and come back. */
static int run_on(struct dev *dev, const struct op_call *c, struct err *e)
{
    struct op_call there = *c;
    struct lane lane = {.dev = dev, .err = e};
    int n = c->desc->n_args, st = ST_OK;
    if (dev->kind != DEV_CUDA)
        return op_call_run(ops_for(dev), &lane, c);
    for (int i = 0; i < n; i++)
        there.t[i].data = NULL;
    for (int i = 0; i < n && st == ST_OK; i++) {
        int64_t bytes = tensor_bytes(&c->t[i]);
        if (c->t[i].data == NULL)
            continue;
        st = dev->vt->alloc(dev, max_i64(bytes, 1), &there.t[i].data, e);
        if (st == ST_OK)
            st = dev->vt->copy_in(dev, there.t[i].data, c->t[i].data, bytes, e);
    }
    if (st == ST_OK)
        st = op_call_run(ops_for(dev), &lane, &there);
    if (st == ST_OK)
        st = dev->vt->sync(dev, e);
    for (int i = 0; i < n; i++) {
        if (there.t[i].data == NULL)
            continue;
        if (st == ST_OK)
            st = dev->vt->copy_out(dev, c->t[i].data, there.t[i].data, tensor_bytes(&c->t[i]), e);
        dev->vt->free(dev, there.t[i].data);
    }
    return st;
}

static int open_named(struct dev *dev, const char *name, struct err *e)
{
    static const struct {
        const char *name;
        enum dev_kind kind;
        bool fp32;
    } known[] = {
        {"ref", DEV_REF, false}, {"cpu", DEV_CPU, false}, {"cuda", DEV_CUDA, false}, {"cuda-fp32", DEV_CUDA, true}};
    for (int i = 0; i < countof(known); i++)
        if (strcmp(name, known[i].name) == 0)
            return known[i].kind == DEV_CUDA ? dev_open_gpu(dev, &(struct dev_gpu){.fp32 = known[i].fp32}, 0, e)
                                             : dev_open(dev, known[i].kind, 0, e);
    return err_set(e, ST_USAGE, "--dev=%s: the devices are ref, cpu, cuda and cuda-fp32", name);
}

static int execute(const struct op_desc *d, const struct config_args *args, struct err *e)
{
    const char *in_path = args->extra[0].value, *out_path = args->extra[1].value, *dev_name = args->extra[2].value;
    struct op_call c = {.desc = d};
    struct st_file *in = NULL;
    struct dev dev = {0};
    int st;
    for (int i = 0; i < d->n_attrs; i++)
        c.attr[i] = d->attrs[i].value;
    TRY_OUT(set_attributes(&c, args, e));
    if (in_path == NULL || out_path == NULL)
        TRY_OUT(err_set(e, ST_USAGE, "braid op %s needs --in and --out", d->name));
    TRY_OUT(open_named(&dev, dev_name != NULL ? dev_name : "cpu", e));
    if (!ops_has(ops_for(&dev), d->name))
        TRY_OUT(err_set(e, ST_UNSUPPORTED, "%s has no op %s", dev.name, d->name));
    TRY_OUT(st_open(&in, in_path, e));
    const struct ops *ops = ops_for(&dev);
    TRY_OUT(read_inputs(&c, in, ops, e));
    TRY_OUT(op_guard_inputs(&c, e));
    TRY_OUT(op_call_infer(&c, ops, e));
    TRY_OUT(check_sizes(&c, e));
    TRY_OUT(allocate(&c, in, e));
    TRY_OUT(op_guard_indices(&c, e));
    TRY_OUT(run_on(&dev, &c, e));
    st = write_outputs(&c, out_path, e);
out:
    for (int i = 0; i < d->n_args; i++)
        free(c.t[i].data);
    st_close(in);
    dev_close(&dev);
    return st;
}

static int run(int argc, char **argv, struct err *e)
{
    struct config c;
    struct config_extra extra[] = {{.name = "in"}, {.name = "out"}, {.name = "dev"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    int st = cmd_config(&c, argc, argv, &args, e);
    const char *name = args.n_positional > 0 ? args.positional[0] : NULL;
    const struct op_desc *d = name ? op_find(name) : NULL;
    if (st == ST_OK && name != NULL && strcmp(name, "list") == 0) {
        list_ops();
    } else if (st == ST_OK && d == NULL) {
        st = err_set(e, ST_USAGE, name ? "there is no op '%s'" : "no op was named", name);
        err_hint(e, "`braid op list` shows all ops");
    } else if (st == ST_OK && extra[0].value == NULL && extra[1].value == NULL) {
        describe(d);
    } else if (st == ST_OK) {
        st = execute(d, &args, e);
    }
    config_release(&c);
    return st;
}

int cmd_op(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, NULL))
        return 0;
    struct err e = {0};
    return cmd_exit(run(argc, argv, &e), &e);
}
