/* gate: argument checks, cost, descriptors, test samples and bench shapes; see gate.h. */
#include "ops/check.h"
#include "ops/gate/gate.h"
#include "ops/opshape.h"

#include <string.h>

OP_CHECK(gate_fwd)

OP_CHECK(gate_bwd)

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"heads", 0}, {"n", 33}, {"shared", 0}};

/* shared: one gate for a row. */
static void one_gate(struct op_call *c)
{
    struct tensor *g = &c->t[op_arg_index(c->desc, "g")];
    if (op_dim(c, "shared") != 0)
        *g = g->rank == 3 ? tensor_3d(NULL, DT_NONE, g->dim[0], g->dim[1], 1) : tensor_2d(NULL, DT_NONE, g->dim[0], 1);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gate_fwd, a, c);
    double n = (double)tensor_bytes(&a->x), g = (double)tensor_bytes(&a->g);
    *out = (struct op_cost){.flops = 10 * (double)tensor_elems(&a->x), .bytes = 2 * n + g};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gate_bwd, a, c);
    double n = (double)tensor_bytes(&a->x), g = (double)tensor_bytes(&a->g);
    *out = (struct op_cost){.flops = 14 * (double)tensor_elems(&a->x), .bytes = 3 * n + 2 * g};
}

static const struct op_sample samples[] = {
    {"rows=5 n=33"},
    {"rows=1 n=1"},
    {"rows=0 n=8"},
    {"rows=3 n=0"},
    {"rows=3 n=0 shared=1"},
    {"rows=7 n=65 shared=1"},
    {"rows=300 n=31 strided=1"},
    {"rows=70 heads=3 n=16 strided=1"},
    {"rows=129 heads=5 n=17 shared=1 strided=1"},
    {"rows=70 heads=3 n=64"},
    {"rows=33 n=1032"},
    {"rows=33 n=1032 shared=1"},
};
static const struct op_sample bench[] = {{"rows=4096 n=320"},
                                         {"rows=4096 heads=5 n=64"},
                                         {"rows=4096 n=864 shared=1"},
                                         {"rows=16384 n=2048 gpu=1"},
                                         {"rows=16384 n=2048 shared=1 gpu=1"}};

OP_TABLES(gate_fwd, GATE_FWD_FIELDS);
const struct op_desc gate_fwd_desc = {
    OP_IS(gate_fwd),       .summary = "x times the sigmoid of a gate",
    OP_LIST(dims, dims),   .sample_shapes = one_gate,
    .cost = fwd_cost,      .backward = "gate_bwd",
    .tolerance = 2e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(gate_bwd, GATE_BWD_FIELDS);
const struct op_desc gate_bwd_desc = {
    OP_IS(gate_bwd),           .summary = "gradient of gate_fwd",
    OP_LIST(dims, dims),       .sample_shapes = one_gate,
    .cost = bwd_cost,          .tolerance = 3e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
