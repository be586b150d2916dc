/* Warps that meet: votes and shuffles (cuda_runtime.h reads what was given), matrix loads and products. */
#include "machine.h"
#include "ops/cuda/ptx.cuh"

static const char *const NAMES[] = {"__syncwarp", "a shuffle", "a vote",    "a match", "a warp's reduction",
                                    "ldmatrix",   "stmatrix",  "movmatrix", "mma"};

static void leave_meeting(struct fiber *f)
{
    struct emu_meeting *m = f->meeting;
    f->meeting = NULL;
    if (m == NULL)
        return;
    m->left |= 1u << f->lane;
    if (m->left == m->came)
        delete m;
}

static bool is_full(const struct warp *w, const struct emu_meeting *m)
{
    return ((m->came | w->gone | ~w->exist) & m->mask) == m->mask;
}

static void begin_reading(struct warp *w, struct emu_meeting *m, void (*all)(struct emu_meeting *))
{
    for (size_t i = 0; i < w->open.size(); i++)
        if (w->open[i] == m)
            w->open.erase(w->open.begin() + (long)i);
    if (all != NULL)
        all(m);
    if (m->kind == EMU_SYNCWARP)
        race_warp_meets(w, m->came);
    for (int l = 0; l < 32; l++)
        if (m->came >> l & 1)
            wake(w->lane[l]);
}

const struct emu_meeting *emu_meet(unsigned mask, enum emu_kind kind, const void *give, size_t bytes,
                                   void (*all)(struct emu_meeting *))
{
    NOTE_PLACE();
    struct fiber *f = self();
    struct warp *w = f->warp;
    struct emu_meeting *m = NULL;
    if (!(mask >> f->lane & 1))
        emu_fail("%s: lane %d is not in its own mask %#x", NAMES[kind], f->lane, mask);
    if (bytes > EMU_GIVEN)
        emu_fail("%s of %zu bytes", NAMES[kind], bytes);
    leave_meeting(f);
    for (struct emu_meeting *o : w->open)
        if (o->mask & mask & ~(o->came)) {
            if (o->kind != kind || o->mask != mask)
                emu_fail(
                    "lanes of a warp meet at different places: %s with mask %#x, where others are at %s with mask %#x",
                    NAMES[kind], mask, NAMES[o->kind], o->mask);
            m = o;
        }
    if (m == NULL) {
        m = new emu_meeting;
        m->mask = mask;
        m->came = m->left = 0;
        m->kind = kind;
        w->open.push_back(m);
    }
    if (bytes > 0)
        memcpy(m->given[f->lane], give, bytes);
    m->came |= 1u << f->lane;
    f->meeting = m;
    if (is_full(w, m))
        begin_reading(w, m, all);
    else
        wait_here(NAMES[kind], m, mask);
    return m;
}

void meetings_at_exit(struct fiber *f)
{
    leave_meeting(f);
    for (size_t i = 0; i < f->warp->open.size();) {
        struct emu_meeting *m = f->warp->open[i];
        if (!is_full(f->warp, m)) {
            i++;
            continue;
        }
        if (m->kind > EMU_REDUCE)
            emu_fail("a lane has ended where its warp is at %s", NAMES[m->kind]);
        begin_reading(f->warp, m, NULL);
    }
}

/* ---- matrices -------------------------------------------------------------------------------- */

static float low(uint32_t v) { return __uint_as_float(v << 16); }
static float high(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }

/* C[16][8] += A[16][depth] B[depth][8]: see src/ops/cuda/ptx.cuh for who holds what. */
void emu_mma_all(struct emu_meeting *m)
{
    float a[16][16], b[16][8];
    struct emu_mma v[32];
    for (int l = 0; l < 32; l++)
        memcpy(&v[l], m->given[l], sizeof v[l]);
    int depth = v[0].depth;
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        if (v[l].depth != depth)
            emu_fail("lanes of a warp multiply with different depths");
        for (int k = 0; k < depth; k += 8) {
            uint32_t upper = v[l].a[k / 8 * 2], lower = v[l].a[k / 8 * 2 + 1], right = v[l].b[k / 8];
            a[g][k + 2 * t] = low(upper);
            a[g][k + 2 * t + 1] = high(upper);
            a[g + 8][k + 2 * t] = low(lower);
            a[g + 8][k + 2 * t + 1] = high(lower);
            b[k + 2 * t][g] = low(right);
            b[k + 2 * t + 1][g] = high(right);
        }
    }
    float sum[16][8] = {};
    for (int k = 0; k < depth; k++)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++)
                sum[i][j] += a[i][k] * b[k][j];
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        for (int e = 0; e < 4; e++)
            v[l].c[e] += sum[g + e / 2 * 8][2 * t + e % 2];
        memcpy(m->given[l], v[l].c, sizeof v[l].c);
    }
}

static void load_matrices_all(struct emu_meeting *m, bool transposed)
{
    uint16_t row[32][8];
    for (int l = 0; l < 32; l++) {
        uint32_t at;
        memcpy(&at, m->given[l], sizeof at);
        if (at % 16 != 0)
            emu_fail("ldmatrix: row address %#x of lane %d is no multiple of 16", at, l);
        memcpy(row[l], emu_shared_pointer(at), 16);
        race_access(self()->warp->lane[l], emu_shared_pointer(at), 16, false, self()->pc);
    }
    for (int l = 0; l < 32; l++) {
        uint32_t r[4];
        int g = l / 4, t = l % 4;
        for (int k = 0; k < 4; k++)
            r[k] = transposed ? (uint32_t)row[8 * k + 2 * t][g] | (uint32_t)row[8 * k + 2 * t + 1][g] << 16
                              : (uint32_t)row[8 * k + g][2 * t] | (uint32_t)row[8 * k + g][2 * t + 1] << 16;
        memcpy(m->given[l], r, sizeof r);
    }
}
void emu_load_matrices_all(struct emu_meeting *m) { load_matrices_all(m, false); }
void emu_load_matrices_t_all(struct emu_meeting *m) { load_matrices_all(m, true); }

void emu_store_matrices_all(struct emu_meeting *m)
{
    uint32_t v[32][5];
    for (int l = 0; l < 32; l++)
        memcpy(v[l], m->given[l], sizeof v[l]);
    for (int k = 0; k < 4; k++)
        for (int l = 0; l < 32; l++) {
            uint32_t at = v[8 * k + l / 4][0];
            if (at % 16 != 0)
                emu_fail("stmatrix: row address %#x is no multiple of 16", at);
            char *to = (char *)emu_shared_pointer(at) + l % 4 * 4;
            memcpy(to, &v[l][1 + k], 4);
            watch_write(self()->warp->lane[l], to, 4);
        }
}

void emu_transpose_all(struct emu_meeting *m)
{
    uint16_t x[8][8];
    for (int l = 0; l < 32; l++)
        memcpy(&x[l / 4][l % 4 * 2], m->given[l], 4);
    for (int l = 0; l < 32; l++) {
        uint16_t y[2] = {x[l % 4 * 2][l / 4], x[l % 4 * 2 + 1][l / 4]};
        memcpy(m->given[l], y, sizeof y);
    }
}
