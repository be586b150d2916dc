/* A timeline as a table, as a picture and as a trace for Perfetto; see timeline.h. */
#include "sim/timeline.h"

#include <math.h>
#include <string.h>

/* ---- table ----------------------------------------------------------------------------------- */

static double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

void timeline_print(const struct timeline *tl, struct buf *out)
{
    const struct mesh *m = &tl->rank[0].t.model.mesh;
    double total = tl->seconds;
    bool to_host = false;
    for (int r = 0; r < tl->n; r++)
        to_host |= tl->rank[r].moved[KIND_HOST] > 0;
    char mesh[160];
    buf_addf(out, "%d ranks: %s; stages of %d chunks; %lld microbatches of %lld x %lld\n", m->world,
             mesh_text(m, mesh, sizeof mesh), m->vpp, (long long)tl->rank[0].t.n_micro,
             (long long)tl->cfg->train.micro_batch, (long long)tl->cfg->train.seq);
    machine_print(&tl->machine, tl->times != NULL, out);
    buf_addf(
        out,
        "step: %.2f ms (%.2f ms for the microbatches, %.2f ms for the update), %.3g model TFLOP/s of each rank%s\n",
        total * 1e3, tl->train.sim.makespan * 1e3, tl->update.sim.makespan * 1e3, tl->tflops,
        tl->column ? "; one rank of each stage is shown, the others do the same beside it" : "");
    buf_addf(out,
             "exposed: ms in which the link was busy and nothing was computed (in brackets: ms the link was busy); "
             "bubble: neither\n\n%4s %5s %9s %7s",
             "rank", "stage", "computing", "bubble");
    for (int k = KIND_DISPATCH; k < KIND_COUNT; k++)
        if (k != KIND_HOST || to_host)
            buf_addf(out, " %17s", task_kind_name((enum task_kind)k));
    buf_addf(out, " %9s %6s %12s\n", "exposed", "frames", "memory");
    for (int r = 0; r < tl->n; r++) {
        const struct timeline_rank *k = &tl->rank[r];
        double exposed = 0;
        char memory[32];
        for (int i = KIND_DISPATCH; i < KIND_COUNT; i++)
            exposed += k->exposed[i];
        buf_addf(out, "%4d %5d %8.1f%% %6.1f%%", k->t.model.mesh.rank, k->t.model.mesh.pp_rank,
                 percent(total - exposed - k->bubble, total), percent(k->bubble, total));
        for (int i = KIND_DISPATCH; i < KIND_COUNT; i++)
            if (i != KIND_HOST || to_host)
                buf_addf(out, " %8.2f (%6.1f)", k->exposed[i] * 1e3, k->moved[i] * 1e3);
        buf_addf(out, " %8.1f%% %6d %12s\n", percent(exposed, total), tl->train.sim.rank[r].peak_frames,
                 human_bytes((double)(k->persistent + k->working), memory, sizeof memory));
    }
}

/* ---- picture --------------------------------------------------------------------------------- */

enum { WIDTH = 1500, LEFT = 110, RIGHT = 20, TOP = 96, ROW = 18, GAP = 10 };

static const char style[] =
    "<style>"
    "svg{--paper:#fff;--ink:#1f2430;--faint:#8b93a3;--grid:#e3e6ec;--lane:#f5f6f9;--forward:#4c8df6;--backward:#f08c3a;"
    "--dw:#3aa76d;"
    "--replay:#a3aab8;--update:#8a63d2;--dispatch:#d6336c;--combine:#e8789f;--cut:#0fa3b1;--reduce:#b08900;--gather:#"
    "d4b106;--context:#2b8a3e;--rows:#9c36b5;--host:#2f6f73;--summary:#6b7280}"
    "@media(prefers-color-scheme:dark){svg{--paper:#14171d;--ink:#e7eaf0;--faint:#8b93a3;--grid:#2a2f3a;--lane:#1b1f27;"
    "--forward:#5b9bff;"
    "--backward:#f59f4d;--dw:#4cc38a;--replay:#6f7887;--update:#a184e8;--dispatch:#f0568c;--combine:#f49bb9;--cut:#"
    "2fc4d1;--reduce:#d6ab1c;"
    "--gather:#eecb3f;--context:#69db7c;--rows:#cc5de8;--host:#5fb3b8;--summary:#9aa3b2}}"
    ".bg{fill:var(--paper)}.lane{fill:var(--lane)}.grid{stroke:var(--grid)}text{fill:var(--ink);font:12px "
    "system-ui,sans-serif}"
    ".small{font-size:11px;fill:var(--faint)}.no{font-size:10px;fill:#fff;pointer-events:none;text-anchor:middle}.odd{"
    "fill-opacity:.72}"
    ".forward{fill:var(--forward)}.backward{fill:var(--backward)}.dw{fill:var(--dw)}.replay{fill:var(--replay)}.update{"
    "fill:var(--update)}"
    ".dispatch{fill:var(--dispatch)}.combine{fill:var(--combine)}.cut{fill:var(--cut)}.reduce{fill:var(--reduce)}."
    "gather{fill:var(--gather)}"
    ".context{fill:var(--context)}.rows{fill:var(--rows)}.host{fill:var(--host)}.summary{fill:var(--summary)}</"
    "style>\n";

/* Where everything is. */
struct sheet {
    struct buf *out;
    const struct timeline *tl;
    double scale; /* pixels per second */
    int lanes[LANE_COUNT], n_lanes;
    int height;
};

static double x_of(const struct sheet *s, double t) { return LEFT + t * s->scale; }
static int y_of(const struct sheet *s, int rank, int lane)
{
    return TOP + rank * (s->n_lanes * ROW + GAP) + lane * ROW;
}

static void find_lanes(struct sheet *s)
{
    for (int l = 0; l < LANE_COUNT; l++) {
        bool used = l == LANE_COMPUTE;
        for (int r = 0; r < s->tl->n; r++)
            used |= s->tl->train.sim.rank[r].busy[l] > 0 || s->tl->update.sim.rank[r].busy[l] > 0;
        if (used)
            s->lanes[s->n_lanes++] = l;
    }
    s->height = y_of(s, s->tl->n, 0) + 40;
}

/* Neighbours of one kind, microbatch and chunk are drawn as one where a gap could not be seen. */
struct bar {
    double begin, end;
    struct task_mark mark;
    const char *name;
    int tasks;
};

static void draw_bar(const struct sheet *s, const struct bar *b, int y)
{
    double x = x_of(s, b->begin), width = (b->end - b->begin) * s->scale;
    if (b->tasks == 0 || width < 0.05) /* too small to be seen */
        return;
    buf_addf(s->out, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" class=\"%s%s\"", x, y + 1, width, ROW - 2,
             task_kind_name(b->mark.kind), b->mark.mb % 2 ? " odd" : "");
    if (width > 1) { /* what the pointer can find */
        buf_addf(s->out, "><title>%s%s%s, microbatch %d, chunk %d: %.3f to %.3f ms</title></rect>",
                 b->tasks == 1 && b->name != NULL ? b->name : "", b->tasks == 1 && b->name != NULL ? ", " : "",
                 task_kind_name(b->mark.kind), b->mark.mb, b->mark.chunk, b->begin * 1e3, b->end * 1e3);
        bool numbered = b->mark.kind != KIND_UPDATE && b->mark.kind < KIND_REDUCE;
        if (width > (b->mark.mb < 10 ? 8 : 14) && numbered)
            buf_addf(s->out, "<text class=\"no\" x=\"%.1f\" y=\"%d\">%d</text>", x + width / 2, y + ROW - 5,
                     b->mark.mb);
    } else {
        buf_add(s->out, "/>");
    }
    buf_add(s->out, "\n");
}

static void draw_lane(const struct sheet *s, const struct timeline_half *h, int r, int lane, int y, double offset)
{
    const struct sim_rank *rank = &h->sim.rank[r];
    struct bar bar = {0};
    for (int i = 0; i < rank->n; i++) {
        const struct sim_task *t = &rank->task[i];
        const struct task_mark *m = &h->mark[r][i];
        if (t->lane != lane || t->end <= t->start)
            continue;
        bool same = bar.tasks > 0 && bar.mark.kind == m->kind && bar.mark.mb == m->mb && bar.mark.chunk == m->chunk &&
                    (t->start + offset - bar.end) * s->scale < 0.3;
        if (!same) {
            draw_bar(s, &bar, y);
            bar = (struct bar){.begin = t->start + offset, .mark = *m, .name = t->name};
        }
        bar.end = t->end + offset;
        bar.tasks++;
    }
    draw_bar(s, &bar, y);
}

static double tick_of(double seconds)
{
    double rough = seconds / 10, base = pow(10, floor(log10(rough > 0 ? rough : 1)));
    return rough / base < 2 ? 2 * base : rough / base < 5 ? 5 * base : 10 * base;
}

static void draw_grid(const struct sheet *s)
{
    double step = tick_of(s->tl->seconds);
    for (double t = 0; t <= s->tl->seconds * 0.97; t += step)
        buf_addf(s->out,
                 "<line class=\"grid\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/><text class=\"small\" x=\"%.1f\" "
                 "y=\"%d\">%g ms</text>\n",
                 x_of(s, t), TOP - 4, x_of(s, t), s->height - 30, x_of(s, t) + 2, s->height - 16, t * 1e3);
}

static void draw_legend(const struct sheet *s)
{
    double moved[KIND_COUNT] = {0};
    int x = LEFT;
    for (int r = 0; r < s->tl->n; r++)
        for (int k = 0; k < KIND_COUNT; k++)
            moved[k] += s->tl->rank[r].moved[k];
    for (int k = 0; k < KIND_COUNT; k++) {
        if (k >= KIND_DISPATCH && moved[k] <= 0)
            continue;
        buf_addf(s->out,
                 "<rect x=\"%d\" y=\"62\" width=\"14\" height=\"12\" class=\"%s\"/><text x=\"%d\" y=\"72\">%s</text>\n",
                 x, task_kind_name((enum task_kind)k), x + 19, task_kind_name((enum task_kind)k));
        x += 94;
    }
    buf_addf(s->out, "<text class=\"small\" x=\"%d\" y=\"72\">numbers: microbatches; odd ones lighter</text>\n", x);
}

static void draw_head(const struct sheet *s)
{
    const struct timeline *tl = s->tl;
    const struct mesh *m = &tl->rank[0].t.model.mesh;
    const struct machine *p = &tl->machine;
    static const char *const overlaps[] = {[CFG_OVERLAP_NONE] = "no overlap",
                                           [CFG_OVERLAP_EP] = "overlap ep",
                                           [CFG_OVERLAP_DW] = "overlap dw",
                                           [CFG_OVERLAP_TP] = "overlap tp"};
    buf_addf(s->out,
             "<text x=\"%d\" y=\"22\" style=\"font-size:15px;font-weight:600\">%s: one step of %d ranks, %.2f ms; PP%d "
             "x VPP%d, TP%d, CP%d, DP%d, EP%d, ETP%d, %lld microbatches, %s%s%s</text>\n",
             LEFT, tl->times != NULL ? "Measured computing, predicted links" : "Predicted", m->world, tl->seconds * 1e3,
             m->pp, m->vpp, m->tp, m->cp, m->dp, m->ep, m->etp, (long long)tl->rank[0].t.n_micro,
             overlaps[tl->cfg->parallel.overlap], tl->cfg->plan.delay_dw ? ", delayed dW" : "",
             tl->column ? "; one rank of each stage" : "");
    buf_addf(s->out,
             "<text class=\"small\" x=\"%d\" y=\"42\">assumed: %.3g GB/s and %.3g us to other machines, %.3g GB/s "
             "within a machine of %d, even routing, +%.0f %% computing beside a busy link</text>\n",
             LEFT, p->link * 1e-9, p->link_delay * 1e6, p->inner * 1e-9, p->gpus, p->beside * 100);
}

void timeline_svg(const struct timeline *tl, struct buf *out)
{
    struct sheet s = {.out = out, .tl = tl, .scale = (WIDTH - LEFT - RIGHT) / (tl->seconds > 0 ? tl->seconds : 1)};
    find_lanes(&s);
    buf_addf(out,
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\" "
             "aria-label=\"schedule of all ranks\">\n",
             WIDTH, s.height, WIDTH, s.height);
    buf_add(out, style);
    buf_addf(out, "<rect class=\"bg\" width=\"%d\" height=\"%d\"/>\n", WIDTH, s.height);
    draw_head(&s);
    draw_legend(&s);
    for (int r = 0; r < tl->n; r++)
        for (int l = 0; l < s.n_lanes; l++)
            buf_addf(out,
                     "<rect class=\"lane\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/><text x=\"8\" "
                     "y=\"%d\">%s</text><text class=\"small\" x=\"58\" y=\"%d\">%s</text>\n",
                     LEFT, y_of(&s, r, l) + 1, WIDTH - LEFT - RIGHT, ROW - 2, y_of(&s, r, l) + ROW - 5, "",
                     y_of(&s, r, l) + ROW - 5, lane_name(s.lanes[l]));
    draw_grid(&s);
    for (int r = 0; r < tl->n; r++) {
        buf_addf(out, "<text x=\"8\" y=\"%d\">rank %d</text>\n", y_of(&s, r, 0) + ROW - 5,
                 tl->rank[r].t.model.mesh.rank);
        for (int l = 0; l < s.n_lanes; l++) {
            draw_lane(&s, &tl->train, r, s.lanes[l], y_of(&s, r, l), 0);
            draw_lane(&s, &tl->update, r, s.lanes[l], y_of(&s, r, l), tl->train.sim.makespan);
        }
    }
    buf_add(out, "</svg>\n");
}

/* ---- trace ----------------------------------------------------------------------------------- */

static void trace_half(const struct timeline *tl, const struct timeline_half *h, double offset, struct buf *out)
{
    for (int r = 0; r < tl->n; r++)
        for (int i = 0; i < h->sim.rank[r].n; i++) {
            const struct sim_task *t = &h->sim.rank[r].task[i];
            const struct task_mark *m = &h->mark[r][i];
            if (t->end > t->start)
                buf_addf(out,
                         ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%."
                         "3f,\"args\":{\"kind\":\"%s\",\"mb\":%d,\"chunk\":%d}}",
                         t->name != NULL ? t->name : "?", task_kind_name(m->kind), tl->rank[r].t.model.mesh.rank,
                         t->lane, (t->start + offset) * 1e6, (t->end - t->start) * 1e6, task_kind_name(m->kind), m->mb,
                         m->chunk);
        }
}

void timeline_trace(const struct timeline *tl, struct buf *out)
{
    buf_add(out, "[");
    for (int r = 0; r < tl->n; r++) {
        int rank = tl->rank[r].t.model.mesh.rank;
        buf_addf(out, "%s{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d (%s)\"}}",
                 r > 0 ? ",\n" : "", rank, rank,
                 tl->times != NULL ? "measured computing, predicted links" : "predicted");
        for (int l = 0; l < LANE_COUNT; l++)
            buf_addf(out, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
                     rank, l, lane_name(l));
    }
    trace_half(tl, &tl->train, 0, out);
    trace_half(tl, &tl->update, tl->train.sim.makespan, out);
    buf_add(out, "]\n");
}
