/* Which part of a pattern a pipeline rank and virtual stage runs. */
#include "model/pattern.h"

#include <string.h>

static bool given(int n) { return n != PATTERN_NOT_GIVEN; }

static size_t first_cut(const struct pattern *p) { return strcspn(p->text, "|"); }

/* ---- without '|': even shares ---------------------------------------------------------------- */

struct slice {
    int64_t from, n; /* physical layers */
};

/* Layer counts for the first or last rank leave the rest to those between them. */
static int uneven_slice(const struct pattern *p, const struct pattern_place *at, struct slice *out,
                        enum pattern_error *code, struct err *e)
{
    int64_t first = given(at->first_layers) ? at->first_layers : 0;
    int64_t last = given(at->last_layers) ? at->last_layers : 0;
    int64_t stages = (int64_t)at->pp_size - given(at->first_layers) - given(at->last_layers);
    int64_t middle = p->n_layers - first - last;
    if (middle < 0 || (stages == 0 ? middle != 0 : middle % stages != 0)) {
        *code = PATTERN_AUTO_MIDDLE;
        err_set(e, ST_USAGE,
                "Middle layers: %lld (of %d, less %lld first and %lld last) are not evenly "
                "divisible by %lld stages",
                (long long)middle, p->n_layers, (long long)first, (long long)last, (long long)stages);
        err_hint(e, "mark the stages in model.pattern with '|'");
        return ST_USAGE;
    }
    int64_t share = stages > 0 ? middle / stages : 0;
    if (given(at->first_layers) && at->pp_rank == 0)
        *out = (struct slice){0, first};
    else if (given(at->last_layers) && at->pp_rank == at->pp_size - 1)
        *out = (struct slice){p->n_layers - last, last};
    else
        *out = (struct slice){first + (at->pp_rank - given(at->first_layers)) * share, share};
    return ST_OK;
}

static int even_slice(const struct pattern *p, const struct pattern_place *at, struct slice *out,
                      enum pattern_error *code, struct err *e)
{
    if (p->n_layers % at->pp_size != 0) {
        *code = PATTERN_AUTO_DIV;
        err_set(e, ST_USAGE, "the %d layers of model.pattern are not evenly divisible by %d pipeline ranks",
                p->n_layers, at->pp_size);
        err_hint(e, "mark the stages in model.pattern with '|'");
        return ST_USAGE;
    }
    int64_t share = p->n_layers / at->pp_size;
    *out = (struct slice){at->pp_rank * share, share};
    return ST_OK;
}

/* A cut in front of this layer falls between two items. */
static bool on_boundary(const struct pattern *p, int64_t layer)
{
    return layer == p->n_layers || p->items[p->item_of[layer]].first == layer;
}

static int item_at(const struct pattern *p, int64_t layer)
{
    return layer == p->n_layers ? p->n_items : p->item_of[layer];
}

static int auto_split(const struct pattern *p, const struct pattern_place *at, struct pattern_chunk *out, struct err *e)
{
    struct slice s;
    out->auto_split = true;
    if (given(at->vp)) {
        out->error = PATTERN_VPP_NO_PIPE;
        err_set(e, ST_USAGE, "Virtual pipeline parallelism needs a model.pattern with '|' between its stages");
        return err_hint(e, "cut it into parallel.pp * parallel.vpp segments, or leave parallel.vpp out");
    }
    if (given(at->first_layers) || given(at->last_layers))
        TRY(uneven_slice(p, at, &s, &out->error, e));
    else
        TRY(even_slice(p, at, &s, &out->error, e));
    int64_t cut = on_boundary(p, s.from) ? s.from + s.n : s.from;
    if (!on_boundary(p, cut)) {
        out->error = PATTERN_GROUP_SPLIT;
        return pattern_refuse(p->text, p->at[cut], e, "cutting between pipeline ranks would split a bracketed group");
    }
    int first = item_at(p, s.from), end = item_at(p, s.from + s.n);
    out->part = (struct pattern_segment){(uint16_t)first, (uint16_t)(end - first), (uint16_t)s.from, (uint16_t)s.n};
    return ST_OK;
}

/* ---- with '|': segments ---------------------------------------------------------------------- */

static int segments_divide(const struct pattern *p, int pp_size, enum pattern_error *code, struct err *e)
{
    if (p->n_segments == 1 || p->n_segments % pp_size == 0)
        return ST_OK;
    *code = PATTERN_SEG_DIV;
    return pattern_refuse(p->text, first_cut(p), e, "%d segments are not evenly divisible among %d pipeline ranks: cut",
                          p->n_segments, pp_size);
}

static int bad_place(enum pattern_error *code, struct err *e)
{
    *code = PATTERN_PLACE;
    return err_set(e, ST_INVALID, "not a pipeline place: rank, size, virtual stage or layer counts are out of range");
}

int pattern_choose(const struct pattern *p, const struct pattern_place *at, struct pattern_chunk *out, struct err *e)
{
    *out = (struct pattern_chunk){0};
    if (at->pp_size < 1 || at->pp_rank < 0 || at->pp_rank >= at->pp_size || at->vp < PATTERN_NOT_GIVEN ||
        at->first_layers < PATTERN_NOT_GIVEN || at->last_layers < PATTERN_NOT_GIVEN)
        return bad_place(&out->error, e);
    if (p->n_segments > 1 && (given(at->first_layers) || given(at->last_layers))) {
        out->error = PATTERN_PIPE_FIRST_LAST;
        return pattern_refuse(p->text, first_cut(p), e,
                              "Cannot specify layer counts of the first or last pipeline stage beside '|'");
    }
    if (p->n_segments == 1 && at->pp_size > 1)
        return auto_split(p, at, out, e);
    TRY(segments_divide(p, at->pp_size, &out->error, e));
    int64_t index = (given(at->vp) ? at->vp : 0) * (int64_t)at->pp_size + at->pp_rank;
    if (index >= p->n_segments) {
        out->error = PATTERN_SEG_RANGE;
        err_set(e, ST_USAGE, "segment %lld of model.pattern (rank %d, virtual stage %d) is out of range: it has %d",
                (long long)index, at->pp_rank, at->vp, p->n_segments);
        return err_hint(e, "parallel.pp * parallel.vpp segments are needed, with | between them; or leave parallel.vpp "
                           "out");
    }
    out->part = p->segments[index];
    return ST_OK;
}

int pattern_virtual_stages(const struct pattern *p, int pp_size, int *out, enum pattern_error *code, struct err *e)
{
    *code = PATTERN_OK;
    *out = 0;
    if (pp_size < 1)
        return bad_place(code, e);
    TRY(segments_divide(p, pp_size, code, e));
    *out = p->n_segments > pp_size ? p->n_segments / pp_size : 0;
    return ST_OK;
}
