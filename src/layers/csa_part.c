/* Compressed attention where ranks divide sequences: the rows that a rank takes from the one before it. The maths is in
 * csa.c, and its rules say which sizes can be divided. */
#include "layers/csa_int.h"
#include "ops/addnorm/addnorm.h"

int64_t csa_past_rows(const struct csa *c) { return (c->overlap ? 2 : 1) * c->ratio; }

void csa_divide(const struct build *b, struct csa *c)
{
    c->divided = context_divides(b);
    c->start = c->divided ? b->mesh->cp_rank * b->seq : 0;
    c->window_rows = c->divided ? min_i64(c->window, b->whole_seq) - 1 : 0;
    c->before = c->start > 0 ? c->window_rows : 0;
}

struct csa_edge csa_edge_slots(struct build *b, const char *name, int64_t rows, int64_t width, bool trained)
{
    struct csa_edge e = {
        .rows = rows, .edge = {.tail = NO_SLOT, .halo = NO_SLOT, .dtail = NO_SLOT, .dhalo = NO_SLOT}, .name = name};
    bool left = b->mesh->cp_rank > 0, right = b->mesh->cp_rank < b->mesh->cp - 1;
    char text[2][64];
    if (rows == 0)
        return e;
    snprintf(text[0], sizeof text[0], "%s_%s", name, "tail");
    snprintf(text[1], sizeof text[1], "d%s_%s", name, "tail");
    if (right) {
        e.edge.tail = build_real(b, text[0], b->batch * rows, width);
        e.edge.dtail = trained ? build_grad(b, text[1], b->batch * rows, width) : NO_SLOT;
    }
    snprintf(text[0], sizeof text[0], "%s_%s", name, "halo");
    snprintf(text[1], sizeof text[1], "d%s_%s", name, "halo");
    if (left) {
        e.edge.halo = build_real(b, text[0], b->batch * rows, width);
        e.edge.dhalo = trained ? build_grad(b, text[1], b->batch * rows, width) : NO_SLOT;
    }
    return e;
}

/* `count` of the last rows of sequence i, `from` on, become rows `to` on of the tail. */
static void declare_piece(struct build *b, int n, const struct csa_edge *e, const struct csa_columns_of *x, int64_t i,
                          int64_t from, int64_t to, int64_t count)
{
    struct graph *g = b->g;
    int64_t row = (i + 1) * b->seq - e->rows + from;
    struct tensor tail = of(g, e->edge.tail), own = of(g, x->x);
    if (count == 0)
        return;
    tail = tensor_cols(&tail, x->first, own.dim[1]);
    GRAPH_OP(g, n, PH_FWD, dropout, .x = tensor_rows(&own, row, count),
             .y = tensor_rows(&tail, i * e->rows + to, count)); /* copies */
    if (e->edge.dtail == NO_SLOT)
        return;
    struct tensor more = of(g, e->edge.dtail), down = of(g, x->dx), sum = tensor_rows(&down, row, count);
    more = tensor_cols(&more, x->first, own.dim[1]);
    GRAPH_OP(g, n, PH_BWD, addnorm_fwd, .x = sum, .f = tensor_rows(&more, i * e->rows + to, count), .s = sum);
}

void csa_edge_declare(struct build *b, const struct csa_edge *e, const struct csa_columns_of *x, int n_x, int64_t turn)
{
    char name[64];
    if (e->rows == 0)
        return;
    snprintf(name, sizeof name, "%s_tail", e->name);
    int n = graph_node(b->g, name, LANE_COMPUTE, NULL);
    for (int64_t i = 0; e->edge.tail != NO_SLOT && b->g->err.code == ST_OK && i < b->batch; i++)
        for (int k = 0; k < n_x; k++) {
            declare_piece(b, n, e, &x[k], i, 0, turn, e->rows - turn);
            declare_piece(b, n, e, &x[k], i, e->rows - turn, 0, turn);
        }
    snprintf(name, sizeof name, "%s_halo", e->name);
    context_halo(b, name, &e->edge);
}
