/* The ways that verify runs a model in; see verify.h: a list of those with names of their own, and
 * all combinations of what they are made of. */
#include "train/verify.h"

#include <stdlib.h>
#include <string.h>

static const struct verify_case cases[] = {
    {"weight gradients delayed", 1, 1, 1, 1, .options = "plan.delay_dw=on"},
    {"everything recomputed", 1, 1, 1, 1, .options = "plan.recompute=full"},
    {"lanes in random order, memory poisoned", 1, 1, 1, 1, .options = "plan.random_lanes=7 plan.poison=on"},
    {"activations in host memory", 1, 1, 1, 1, .options = "plan.offload=* plan.offload_min=0"},
    {"activations in host memory, lanes in random order, memory poisoned", 1, 1, 1, 1,
     .options = "plan.offload=* plan.offload_min=0 plan.recompute=norm plan.random_lanes=9 plan.poison=on"},
    {"optimizer state in host memory", 1, 1, 1, 1, .options = "optim.offload=all optim.overlap=off"},
    {"optimizer state in host memory, updated beside the next step", 1, 1, 1, 1, .options = "optim.offload=all"},
    {"optimizer state in host memory, lanes in random order, memory poisoned", 1, 1, 1, 1,
     .options = "optim.offload=all plan.offload=* plan.offload_min=0 plan.random_lanes=11 plan.poison=on"},
    {"2 virtual stages on one rank", 1, 1, 2, 1, .options = ""},
    {"4 virtual stages on one rank", 1, 1, 4, 1, .options = ""},
    {"DP2", 2, 1, 1, 1, .options = ""},
    {"DP4", 4, 1, 1, 1, .options = ""},
    {"DP4, zero 0", 4, 1, 1, 1, .options = "parallel.zero=0"},
    {"DP2, zero 2", 2, 1, 1, 1, .options = "parallel.zero=2"},
    {"DP2, zero 3", 2, 1, 1, 1, .options = "parallel.zero=3"},
    {"DP4, zero 3, lanes in random order, poisoned", 4, 1, 1, 1,
     .options = "parallel.zero=3 plan.random_lanes=5 plan.poison=on"},
    {"DP8, zero 3", 8, 1, 1, 1, .options = "parallel.zero=3"},
    {"DP2, zero 3, activations and optimizer state in host memory", 2, 1, 1, 1,
     .options = "parallel.zero=3 plan.offload=* plan.offload_min=0 optim.offload=all"},
    {"PP2", 2, 2, 1, 1, .options = ""},
    {"PP4", 4, 4, 1, 1, .options = ""},
    {"PP2 x VPP2", 2, 2, 2, 1, .options = ""},
    {"PP2 x VPP2, delayed, recomputed", 2, 2, 2, 1, .options = "plan.delay_dw=on plan.recompute=full"},
    {"DP2 x PP2", 4, 2, 1, 1, .options = ""},
    {"DP2 x PP2, zero 2", 4, 2, 1, 1, .options = "parallel.zero=2"},
    {"PP2 x VPP2, zero 1, optimizer state in host memory", 4, 2, 2, 1,
     .options = "optim.offload=all plan.random_lanes=4 plan.poison=on"},
    {"EP2", 2, 1, 1, 2, .options = ""},
    {"EP4", 4, 1, 1, 4, .options = ""},
    {"DP2 x EP2", 4, 1, 1, 2, .options = ""},
    {"DP2 x EP2, zero 2", 4, 1, 1, 2, .options = "parallel.zero=2"},
    {"DP2 x EP2, zero 3", 4, 1, 1, 2, .options = "parallel.zero=3"},
    {"EP4, buffers that overflow", 4, 1, 1, 4, .options = "parallel.ep_capacity=0.3"},
    {"EP4, buffers that overflow, optimizer state in host memory", 4, 1, 1, 4,
     .options = "parallel.ep_capacity=0.3 optim.offload=moments"},
    {"EP2, overlap", 2, 1, 1, 2, .options = "parallel.overlap=ep"},
    {"EP2, overlap, weight gradients delayed", 2, 1, 1, 2, .options = "parallel.overlap=ep plan.delay_dw=on"},
    {"EP2, weight gradients under the backward pass", 2, 1, 1, 2, .options = "parallel.overlap=dw"},
    {"PP2 x EP2", 4, 2, 1, 2, .options = ""},
    {"PP2 x VPP2 x EP2, overlap", 4, 2, 2, 2, .options = "parallel.overlap=ep"},
    {"PP2 x VPP2 x EP2, overlap, delayed", 4, 2, 2, 2, .options = "parallel.overlap=ep plan.delay_dw=on"},
    {"PP2 x VPP2 x EP2, overlap, activations in host memory", 4, 2, 2, 2,
     .options = "parallel.overlap=ep plan.offload=* plan.offload_min=0"},
    {"CP2", 2, 1, 1, 1, .options = "", .cp = 2},
    {"CP4", 4, 1, 1, 1, .options = "", .cp = 4},
    {"CP2, recomputed, lanes in random order, poisoned", 2, 1, 1, 1,
     .options = "plan.recompute=full plan.random_lanes=3 plan.poison=on", .cp = 2},
    {"DP2 x CP2, zero 3", 4, 1, 1, 1, .options = "parallel.zero=3", .cp = 2},
    {"CP2 x PP2", 4, 2, 1, 1, .options = "", .cp = 2},
    {"CP2 x EP4, overlap", 4, 1, 1, 4, .options = "parallel.overlap=ep", .cp = 2},
    {"CP4 x EP2, zero 2", 4, 1, 1, 2, .options = "parallel.zero=2", .cp = 4},
    {"CP2, ring", 2, 1, 1, 1, .options = "parallel.cp_comm=ring", .cp = 2},
    {"CP4, ring, recomputed, rest in host memory, lanes in random order, poisoned", 4, 1, 1, 1,
     .options = "parallel.cp_comm=ring plan.recompute=full plan.offload=* plan.offload_min=0 plan.random_lanes=3 "
                "plan.poison=on",
     .cp = 4},
    {"DP2 x CP2, ring, zero 3", 4, 1, 1, 1, .options = "parallel.cp_comm=ring parallel.zero=3", .cp = 2},
    {"CP4 x PP2, ring, delayed", 8, 2, 1, 1, .options = "parallel.cp_comm=ring plan.delay_dw=on", .cp = 4},
    {"CP4 x EP4, ring, overlap", 4, 1, 1, 4, .options = "parallel.cp_comm=ring parallel.overlap=ep", .cp = 4},
    {"TP2 x CP4, ring, zero 2", 8, 1, 1, 1, .options = "parallel.cp_comm=ring parallel.zero=2", .tp = 2, .cp = 4},
    {"TP2", 2, 1, 1, 1, .options = "", .tp = 2},
    {"TP4", 4, 1, 1, 1, .options = "", .tp = 4},
    {"TP2, everything recomputed, lanes in random order, poisoned", 2, 1, 1, 1,
     .options = "plan.recompute=full plan.random_lanes=3 plan.poison=on", .tp = 2},
    {"TP2, weight gradients delayed", 2, 1, 1, 1, .options = "plan.delay_dw=on", .tp = 2},
    {"TP2 x DP2, zero 0", 4, 1, 1, 1, .options = "parallel.zero=0", .tp = 2},
    {"TP2 x DP2, zero 2", 4, 1, 1, 1, .options = "parallel.zero=2", .tp = 2},
    {"TP2 x DP2, zero 3", 4, 1, 1, 1, .options = "parallel.zero=3", .tp = 2},
    {"TP2 x DP2, zero 2, optimizer state in host memory", 4, 1, 1, 1, .options = "parallel.zero=2 optim.offload=all",
     .tp = 2},
    {"TP2 x PP2", 4, 2, 1, 1, .options = "", .tp = 2},
    {"TP2 x EP2", 2, 1, 1, 2, .options = "", .tp = 2},
    {"TP2 x EP4, ranks of two microbatches", 4, 1, 1, 4, .options = "", .tp = 2},
    {"TP4 x EP2", 4, 1, 1, 2, .options = "", .tp = 4},
    {"TP2 x PP2 x VPP2 x EP2, overlap", 4, 2, 2, 2, .options = "parallel.overlap=ep", .tp = 2},
    {"TP2, overlap of rows", 2, 1, 1, 1, .options = "parallel.overlap=tp", .tp = 2},
    {"TP2 x DP2, overlap of rows, zero 3, lanes in random order, poisoned", 4, 1, 1, 1,
     .options = "parallel.overlap=tp parallel.zero=3 plan.random_lanes=3 plan.poison=on", .tp = 2},
    {"TP2, overlap of rows, recomputed, rest in host memory, lanes in random order, poisoned", 2, 1, 1, 1,
     .options = "parallel.overlap=tp plan.recompute=full plan.offload=* plan.offload_min=0 plan.random_lanes=5 "
                "plan.poison=on",
     .tp = 2},
    {"TP2 x PP2 x VPP2 x EP2, overlap of rows and experts", 4, 2, 2, 2, .options = "parallel.overlap=tp", .tp = 2},
    {"ETP2", 2, 1, 1, 1, .options = "", .etp = 2},
    {"ETP2 x EP2", 4, 1, 1, 2, .options = "", .etp = 2},
    {"ETP2 x EP2, buffers that overflow", 4, 1, 1, 2, .options = "parallel.ep_capacity=0.3", .etp = 2},
    {"ETP4, zero 3, recomputed, lanes in random order, poisoned", 4, 1, 1, 1,
     .options = "parallel.zero=3 plan.recompute=full plan.random_lanes=3 plan.poison=on", .etp = 4},
    {"ETP2 x 2 copies, zero 2", 4, 1, 1, 1, .options = "parallel.zero=2", .etp = 2},
    {"TP4 x ETP2 x EP2", 4, 1, 1, 2, .options = "", .tp = 4, .etp = 2},
    {"TP2 x ETP4", 4, 1, 1, 1, .options = "", .tp = 2, .etp = 4},
    {"PP2 x VPP2 x ETP2 x EP2, overlap", 8, 2, 2, 2, .options = "parallel.overlap=ep", .etp = 2},
    {"TP2 x CP2", 4, 1, 1, 1, .options = "", .tp = 2, .cp = 2},
    {"TP2 x CP2 x EP4, zero 2", 8, 1, 1, 4, .options = "parallel.zero=2", .tp = 2, .cp = 2},
};

const struct verify_case *verify_cases(int *n)
{
    *n = countof(cases);
    return cases;
}

/* What a pattern allows: layers with experts; all layers work on a part of a sequence; keys and values travel in a
 * ring. */
struct traits {
    bool experts, parts, ring;
};
static struct traits traits_of(const struct config *small)
{
    struct traits t = {.parts = true, .ring = strchr(small->model.pattern, '*') != NULL};
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++) {
        bool here = core_in(cores[i], small->model.pattern);
        t.experts |= here && cores[i]->has_experts;
        t.parts &= !here || cores[i]->divides_sequence;
    }
    return t;
}

bool verify_applies(const struct config *small, const struct verify_case *variant)
{
    struct traits t = traits_of(small);
    return (t.experts || (variant->ep == 1 && verify_etp(variant) == 1)) && (t.parts || verify_cp(variant) == 1) &&
           (t.ring || strstr(variant->options, "cp_comm=ring") == NULL);
}

/* ---- combinations ---------------------------------------------------------------------------- */

enum factor { PP, CP, RING, TP, VPP, EP, ETP, COPIES, ZERO, OVERLAP, DELAY, RECOMPUTE, FACTORS };
enum { MOST_RANKS = 8, MOST_VALUES = 4 };
struct combination {
    int value[FACTORS]; /* index into values[] */
};
static const int n_values[FACTORS] = {[PP] = 3,  [CP] = 3,     [RING] = 2, [TP] = 2,      [VPP] = 2,   [EP] = 3,
                                      [ETP] = 2, [COPIES] = 4, [ZERO] = 4, [OVERLAP] = 4, [DELAY] = 2, [RECOMPUTE] = 2};
static const int numbers[FACTORS][MOST_VALUES] = {
    [PP] = {1, 2, 4}, [CP] = {1, 2, 4}, [TP] = {1, 2},           [VPP] = {1, 2},
    [EP] = {1, 2, 4}, [ETP] = {1, 2},   [COPIES] = {1, 2, 4, 8}, [ZERO] = {0, 1, 2, 3}};
static const char *const overlaps[] = {"none", "ep", "dw", "tp"};

static int number(const struct combination *c, enum factor f) { return numbers[f][c->value[f]]; }
/* Ranks of a stage; those of them that share a microbatch. */
static int stage_of(const struct combination *c) { return number(c, EP) * number(c, ETP) * number(c, COPIES); }
static int inner_of(const struct combination *c) { return number(c, CP) * number(c, TP); }

/* What rules or schedules refuse, and what would be another combination under a second name. */
static bool legal(const struct combination *c, const struct traits *t)
{
    int pp = number(c, PP), vpp = number(c, VPP), ep = number(c, EP) * number(c, ETP), stage = stage_of(c);
    if (pp * stage > MOST_RANKS || (ep > 1 && !t->experts) || pp * vpp > 4 || stage % inner_of(c) != 0 ||
        (number(c, CP) > 1 && !t->parts) || (c->value[RING] > 0 && (number(c, CP) == 1 || !t->ring)))
        return false;
    int micros = VERIFY_BATCH * inner_of(c) / stage;
    if ((number(c, ZERO) == 3 && pp > 1) || (number(c, ZERO) != 1 && stage == 1))
        return false;
    int overlap = c->value[OVERLAP];
    bool rows = overlap == 3, pairs = overlap == 1 || rows;
    if ((overlap > 0 && !rows && ep == 1) || (rows && number(c, TP) == 1) || (pairs && pp > 1 && vpp == 1))
        return false;
    return vpp == 1 || micros >= pp; /* a group of microbatches for each chunk */
}

static bool next(struct combination *c)
{
    for (int f = FACTORS - 1; f >= 0; f--) {
        if (++c->value[f] < n_values[f])
            return true;
        c->value[f] = 0;
    }
    return false;
}

static int name_case(struct verify_list *l, const struct combination *c, struct verify_case *out, struct err *e)
{
    struct buf name, options;
    int pp = number(c, PP), vpp = number(c, VPP), ep = number(c, EP), copies = number(c, COPIES), tp = number(c, TP),
        etp = number(c, ETP);
    buf_init(&name, 0);
    buf_init(&options, 0);
    if (tp > 1)
        buf_addf(&name, "TP%d over ", tp);
    if (etp > 1)
        buf_addf(&name, "ETP%d x ", etp);
    buf_addf(&name, "PP%d x VPP%d x CP%d x EP%d x %d, zero %d", pp, vpp, number(c, CP), ep, copies, number(c, ZERO));
    buf_addf(&name, "%s%s%s%s%s", c->value[RING] ? ", ring" : "", c->value[OVERLAP] ? ", overlap " : "",
             c->value[OVERLAP] ? overlaps[c->value[OVERLAP]] : "", c->value[DELAY] ? ", delayed" : "",
             c->value[RECOMPUTE] ? ", recomputed" : "");
    buf_addf(&options, "parallel.zero=%d%s parallel.overlap=%s plan.delay_dw=%s plan.recompute=%s", number(c, ZERO),
             c->value[RING] ? " parallel.cp_comm=ring" : "", overlaps[c->value[OVERLAP]],
             c->value[DELAY] ? "on" : "off", c->value[RECOMPUTE] ? "full" : "");
    int st = buf_check(&name, e);
    if (st == ST_OK)
        st = buf_check(&options, e);
    *out = (struct verify_case){
        .ranks = pp * etp * ep * copies, .pp = pp, .vpp = vpp, .ep = ep, .cp = number(c, CP), .tp = tp, .etp = etp};
    if (st == ST_OK) {
        out->name = arena_strdup(&l->text, name.text);
        out->options = arena_strdup(&l->text, options.text);
        st = out->name == NULL || out->options == NULL ? err_set(e, ST_NOMEM, "out of memory listing meshes") : ST_OK;
    }
    buf_release(&name);
    buf_release(&options);
    return st;
}

/* Which pairs of values have been in a case. */
struct pairs {
    bool seen[FACTORS][MOST_VALUES][FACTORS][MOST_VALUES];
};

/* Pairs of this combination that are new; they are marked if asked for. */
static int new_pairs(struct pairs *p, const struct combination *c, bool mark)
{
    int n = 0;
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) {
            bool *seen = &p->seen[a][c->value[a]][b][c->value[b]];
            n += !*seen;
            *seen |= mark;
        }
    return n;
}

static int add_case(struct verify_list *l, const struct combination *c, struct err *e)
{
    TRY(mem_grow((void **)&l->list, &l->cap, (size_t)l->n + 1, sizeof *l->list, e));
    TRY(name_case(l, c, &l->list[l->n], e));
    l->n++;
    return ST_OK;
}

/* The combination with the most new pairs, the first of those; false when none has any. */
static bool best_case(struct pairs *p, const struct traits *t, struct combination *best)
{
    struct combination c = {0};
    int most = 0;
    do {
        int n = legal(&c, t) ? new_pairs(p, &c, false) : 0;
        if (n > most) {
            most = n;
            *best = c;
        }
    } while (next(&c));
    return most > 0;
}

int verify_combinations(struct verify_list *l, const struct config *small, bool all, struct err *e)
{
    struct traits t = traits_of(small);
    struct combination c = {0};
    struct pairs p = {0};
    *l = (struct verify_list){0};
    arena_init(&l->text);
    while (!all && best_case(&p, &t, &c)) {
        new_pairs(&p, &c, true);
        TRY(add_case(l, &c, e));
    }
    if (!all)
        return ST_OK;
    do {
        if (legal(&c, &t))
            TRY(add_case(l, &c, e));
    } while (next(&c));
    return ST_OK;
}

void verify_list_release(struct verify_list *l)
{
    free(l->list);
    arena_release(&l->text);
    *l = (struct verify_list){0};
}
