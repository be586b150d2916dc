/* What hardware copies beside the threads: cp.async, bulk copies and tensor maps, sends in a cluster, wgmma. A transfer
 * is queued with a time drawn from the seed; a wait that covers it makes it happen. Stores have two steps, reading
 * shared memory and writing. */
#include "machine.h"

#include <algorithm>
#include <cuda_bf16.h>
extern "C" {
#include "tensor/f8.h"
}

/* ---- the queue ------------------------------------------------------------------------------- */

static bool later(const transfer_ref &x, const transfer_ref &y) { return x->due > y->due; }

static void set_next_due(struct cluster *c) { c->next_due = c->queue.empty() ? UINT64_MAX : c->queue.front()->due; }
static void enqueue(struct cluster *c, const transfer_ref &t)
{
    t->due = c->tick + 1 + c->draws.below(c->delay);
    c->queue.push_back(t);
    std::push_heap(c->queue.begin(), c->queue.end(), later);
    set_next_due(c);
}
static transfer_ref dequeue(struct cluster *c)
{
    std::pop_heap(c->queue.begin(), c->queue.end(), later);
    transfer_ref t = c->queue.back();
    c->queue.pop_back();
    set_next_due(c);
    return t;
}

static void step(struct transfer *t);

void transfers_due(struct cluster *c)
{
    while (!c->queue.empty() && c->queue.front()->due <= c->tick) {
        transfer_ref t = dequeue(c);
        if (!t->done)
            step(t.get());
        if (!t->done)
            enqueue(c, t);
    }
}
bool transfer_any(struct cluster *c)
{
    while (!c->queue.empty()) {
        transfer_ref t = dequeue(c);
        if (t->done)
            continue;
        step(t.get());
        if (!t->done)
            enqueue(c, t);
        return true;
    }
    return false;
}

static transfer_ref transfer_new(enum transfer_kind kind)
{
    transfer_ref t = std::make_shared<transfer>();
    t->pc = self()->pc;
    t->seen = self()->seen;
    t->kind = kind;
    t->in = self()->in;
    return t;
}

/* ---- boxes of tensor maps -------------------------------------------------------------------- */

static const uint64_t MAP_MAGIC = 0x656d75206d617073ull;
static unsigned element_bytes(const CUtensorMap *m)
{
    return m->type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : m->type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 4;
}
static unsigned box_bytes(const CUtensorMap *m)
{
    unsigned n = element_bytes(m);
    for (int i = 0; i < m->rank; i++)
        n *= m->box[i];
    return n;
}

/* Checks those arguments of cuTensorMapEncodeTiled that the driver checks. */
extern "C" CUresult emu_encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                     const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                     const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    CUtensorMap m = {};
    m.type = (uint16_t)type;
    if (rank < 2 || rank > 4 || data == NULL || (uintptr_t)data % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    m.magic = MAP_MAGIC;
    m.data = (char *)data;
    m.rank = (uint16_t)rank;
    m.swizzle = (uint16_t)swizzle;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (dims[i] == 0 || dims[i] > (1ull << 32) || box[i] == 0 || box[i] > 256 || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= (1ull << 40)))
            return CUDA_ERROR_INVALID_VALUE;
        m.dim[i] = dims[i];
        m.box[i] = box[i];
        if (i > 0)
            m.stride[i - 1] = strides[i - 1];
    }
    unsigned line = m.box[0] * element_bytes(&m);
    if (line % 16 != 0 || (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && line > 128))
        return CUDA_ERROR_INVALID_VALUE;
    *map = m;
    return CUDA_SUCCESS;
}

/* Line l of the box: where it is in memory; NULL: outside. */
static char *box_line(const struct transfer *t, unsigned l, int64_t *col)
{
    const CUtensorMap *m = &t->map;
    char *line = m->data;
    *col = t->at[0];
    for (int i = 1; i < m->rank; l /= m->box[i], i++) {
        int64_t index = t->at[i] + (int64_t)(l % m->box[i]);
        if (index < 0 || (uint64_t)index >= m->dim[i])
            return NULL;
        line += (uint64_t)index * m->stride[i - 1];
    }
    return line;
}
/* Elements of a line that lie inside: from first on, count of them. */
static void line_inside(const struct transfer *t, int64_t col, unsigned *first, unsigned *count)
{
    const CUtensorMap *m = &t->map;
    int64_t begin = col < 0 ? -col : 0, end = (int64_t)m->dim[0] - col;
    end = end > (int64_t)m->box[0] ? m->box[0] : end;
    *first = (unsigned)begin;
    *count = end > begin ? (unsigned)(end - begin) : 0;
}
/* A byte of the box in shared memory: 16-byte pieces change places within 128 bytes, by the
 * address' bits above them. */
static char *swizzled(const struct transfer *t, unsigned byte)
{
    uintptr_t at = (uintptr_t)(t->shared + byte);
    return (char *)(t->map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? at ^ (at >> 7 & 7) << 4 : at);
}

static void read_box(struct transfer *t)
{
    unsigned line_bytes = t->map.box[0] * element_bytes(&t->map), n = t->bytes / line_bytes;
    t->held.resize(t->bytes);
    for (unsigned b = 0; b < n * line_bytes; b += 16)
        memcpy(&t->held[b], swizzled(t, b), 16);
}
static void add_elements(const CUtensorMap *m, char *to, const unsigned char *from, unsigned count)
{
    if (m->type == CU_TENSOR_MAP_DATA_TYPE_UINT8)
        emu_fail("a bulk copy adds bytes, which is not emulated");
    for (unsigned i = 0; i < count; i++)
        if (m->type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
            ((float *)to)[i] += ((const float *)from)[i];
        else
            ((__nv_bfloat16 *)to)[i] =
                __nv_bfloat16((float)((__nv_bfloat16 *)to)[i] + (float)((const __nv_bfloat16 *)from)[i]);
}
static void write_box(struct transfer *t)
{
    unsigned size = element_bytes(&t->map), line_bytes = t->map.box[0] * size;
    for (unsigned l = 0; l < t->bytes / line_bytes; l++) {
        int64_t col;
        unsigned first, count;
        char *line = box_line(t, l, &col);
        line_inside(t, col, &first, &count);
        if (line == NULL || count == 0)
            continue;
        char *to = line + (col + first) * (int64_t)size;
        const unsigned char *from = &t->held[l * line_bytes + first * size];
        if (t->add)
            add_elements(&t->map, to, from, count);
        else
            memcpy(to, from, count * size);
    }
}
static void load_box(struct transfer *t)
{
    unsigned size = element_bytes(&t->map), line_bytes = t->map.box[0] * size;
    std::vector<unsigned char> line(line_bytes);
    for (unsigned l = 0; l < t->bytes / line_bytes; l++) {
        int64_t col;
        unsigned first, count;
        const char *from = box_line(t, l, &col);
        line_inside(t, col, &first, &count);
        memset(line.data(), 0, line_bytes);
        if (from != NULL && count > 0)
            memcpy(&line[first * size], from + (col + first) * (int64_t)size, count * size);
        for (unsigned b = 0; b < line_bytes; b += 16)
            memcpy(swizzled(t, l * line_bytes + b), &line[b], 16);
    }
}

/* ---- one step of a transfer ------------------------------------------------------------------ */

static void run_wgmma(struct transfer *t);

static void finish_transfer(struct transfer *t)
{
    t->done = true;
    if (t->bar != NULL)
        mbarrier_complete(t);
}

static void step(struct transfer *t)
{
    switch (t->kind) {
    case COPY_ASYNC:
        memcpy(t->shared, t->global, t->valid);
        memset(t->shared + t->valid, 0, t->bytes - t->valid);
        race_copy(t);
        watch_clear(t->in, t->shared, t->bytes);
        return finish_transfer(t);
    case BULK_LOAD:
        if (t->tensor)
            load_box(t);
        else
            memcpy(t->shared, t->global, t->bytes);
        race_copy(t);
        watch_clear(t->in, t->shared, t->bytes);
        return finish_transfer(t);
    case SEND:
        memcpy(t->shared, t->held.data(), t->bytes);
        race_copy(t);
        watch_clear(t->in, t->shared, t->bytes);
        return finish_transfer(t);
    case BULK_STORE:
        if (!t->read) {
            if (t->tensor)
                read_box(t);
            else
                t->held.assign((unsigned char *)t->shared, (unsigned char *)t->shared + t->bytes);
            t->read = true;
            return;
        }
        if (t->tensor)
            write_box(t);
        else if (t->add)
            for (unsigned i = 0; i < t->bytes / 4; i++)
                ((float *)t->global)[i] += ((const float *)t->held.data())[i];
        else
            memcpy(t->global, t->held.data(), t->bytes);
        return finish_transfer(t);
    case WGMMA: return run_wgmma(t);
    }
}

/* ---- cp.async -------------------------------------------------------------------------------- */

static void commit(struct commits *c)
{
    c->groups.push_back(std::move(c->open));
    c->open.clear();
}
/* All but the latest `left` groups have happened, or been read. */
static void wait_groups(struct commits *c, int left, bool only_read)
{
    size_t cover = c->groups.size() > (size_t)left ? c->groups.size() - (size_t)left : 0;
    for (size_t i = 0; i < cover; i++)
        for (transfer_ref &t : c->groups[i])
            while (!t->done && !(only_read && t->read))
                step(t.get());
    auto all_done = [](const std::vector<transfer_ref> &g) {
        return std::all_of(g.begin(), g.end(), [](const transfer_ref &t) { return t->done; });
    };
    while (cover-- > 0 && all_done(c->groups.front()))
        c->groups.pop_front();
}

void emu_copy_async(void *shared, const void *global, int bytes, int valid)
{
    NOTE_PLACE();
    (void)emu_shared_address(shared);
    if ((uintptr_t)shared % 16 != 0 || (uintptr_t)global % 16 != 0)
        emu_fail("cp.async from %p to %p: no multiples of 16", global, shared);
    transfer_ref t = transfer_new(COPY_ASYNC);
    t->shared = (char *)shared;
    t->global = (char *)(uintptr_t)global;
    t->bytes = (unsigned)bytes;
    t->valid = (unsigned)valid;
    self()->copies.open.push_back(t);
    enqueue(here(), t);
}
void emu_copies_commit(void) { commit(&self()->copies); }
void emu_copies_wait(int left)
{
    NOTE_PLACE();
    wait_groups(&self()->copies, left, false);
    emu_maybe_yield();
}

/* ---- bulk copies ----------------------------------------------------------------------------- */

static void check_bulk(const void *shared, const void *global, unsigned bytes)
{
    (void)emu_shared_address(shared);
    if ((uintptr_t)shared % 16 != 0 || (uintptr_t)global % 16 != 0 || bytes % 16 != 0 || bytes == 0)
        emu_fail("a bulk copy of %u bytes between %p and shared memory at %p: all must be multiples of 16", bytes,
                 global, shared);
}

void emu_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *bar)
{
    NOTE_PLACE();
    check_bulk(shared, global, bytes);
    transfer_ref t = transfer_new(BULK_LOAD);
    t->shared = (char *)shared;
    t->global = (char *)(uintptr_t)global;
    t->bytes = bytes;
    t->bar = bar;
    enqueue(here(), t);
    emu_maybe_yield();
}
static void bulk_out(void *global, const void *shared, unsigned bytes, bool add)
{
    check_bulk(shared, global, bytes);
    watch_async_read(shared, bytes, "a bulk store");
    transfer_ref t = transfer_new(BULK_STORE);
    t->shared = (char *)(uintptr_t)shared;
    t->global = (char *)global;
    t->bytes = bytes;
    t->add = add;
    self()->bulk.open.push_back(t);
    enqueue(here(), t);
    emu_maybe_yield();
}
void emu_bulk_store(void *global, const void *shared, unsigned bytes)
{
    NOTE_PLACE();
    bulk_out(global, shared, bytes, false);
}
void emu_bulk_add(float *global, const float *shared, unsigned bytes)
{
    NOTE_PLACE();
    bulk_out(global, shared, bytes, true);
}

static transfer_ref tensor_transfer(enum transfer_kind kind, const CUtensorMap *map, int rank, const int *at,
                                    const void *shared)
{
    (void)emu_shared_address(shared);
    if (map->magic != MAP_MAGIC || map->rank != rank)
        emu_fail("a bulk copy of a box of %d dimensions with a tensor map of %d", rank,
                 map->magic == MAP_MAGIC ? map->rank : 0);
    if ((uintptr_t)shared % 128 != 0)
        emu_fail("a box at shared memory %#x: no multiple of 128", emu_shared_address(shared) & 0xffffff);
    transfer_ref t = transfer_new(kind);
    t->shared = (char *)(uintptr_t)shared;
    t->tensor = true;
    t->map = *map;
    t->bytes = box_bytes(map);
    memcpy(t->at, at, (size_t)rank * sizeof *at);
    return t;
}
void emu_tensor_load(void *shared, const CUtensorMap *map, int rank, const int *at, uint64_t *bar)
{
    NOTE_PLACE();
    transfer_ref t = tensor_transfer(BULK_LOAD, map, rank, at, shared);
    t->bar = bar;
    enqueue(here(), t);
    emu_maybe_yield();
}
void emu_tensor_load_many(void *shared, const CUtensorMap *map, int rank, const int *at, uint64_t *bar, unsigned blocks)
{
    NOTE_PLACE();
    struct cluster *c = here();
    for (unsigned r = 0; blocks >> r != 0; r++) {
        if (!(blocks >> r & 1))
            continue;
        unsigned to = emu_shared_address_in(shared, r), ready = emu_shared_address_in(bar, r);
        transfer_ref t = tensor_transfer(BULK_LOAD, map, rank, at, shared);
        t->in = c->blocks[r].get();
        if (t->in->live == 0)
            emu_fail("a bulk copy to block %u of the cluster, which has ended", r);
        t->shared = (char *)emu_shared_pointer(to);
        t->bar = (uint64_t *)emu_shared_pointer(ready);
        enqueue(c, t);
    }
    emu_maybe_yield();
}
void emu_tensor_store(const CUtensorMap *map, int rank, const int *at, const void *shared, bool add)
{
    NOTE_PLACE();
    transfer_ref t = tensor_transfer(BULK_STORE, map, rank, at, shared);
    t->add = add;
    watch_async_read(shared, t->bytes, "a bulk store");
    self()->bulk.open.push_back(t);
    enqueue(here(), t);
    emu_maybe_yield();
}
void emu_bulk_commit(void) { commit(&self()->bulk); }
void emu_bulk_wait(int left, bool only_read)
{
    NOTE_PLACE();
    wait_groups(&self()->bulk, left, only_read);
    emu_maybe_yield();
}

void emu_send(unsigned shared, const void *bytes16, unsigned bar)
{
    NOTE_PLACE();
    struct block *to = block_of_address(shared);
    if (shared % 16 != 0 || block_of_address(bar) != to)
        emu_fail("a send to %#x with the mbarrier at %#x: a multiple of 16, in the same block", shared, bar);
    if (to->live == 0)
        emu_fail("a send to block %u of the cluster, which has ended", to->rank);
    if (here()->blocks.size() < 2)
        emu_fail("a send in a cluster of one block, where it has no effect that is promised");
    transfer_ref t = transfer_new(SEND);
    t->in = to;
    t->shared = (char *)emu_shared_pointer(shared);
    t->bytes = 16;
    t->held.assign((const unsigned char *)bytes16, (const unsigned char *)bytes16 + 16);
    t->bar = (uint64_t *)emu_shared_pointer(bar);
    enqueue(here(), t);
    emu_maybe_yield();
}

/* A thread that ends must have waited until its stores have read shared memory; a block that ends must not be written
 * to. */
void transfers_at_exit(struct fiber *f)
{
    bool unread = !f->bulk.open.empty();
    for (auto &g : f->bulk.groups)
        for (transfer_ref &t : g)
            unread = unread || !t->read;
    if (unread)
        emu_fail("a thread ends before its bulk stores have read shared memory");
    if (f->in->live > 1)
        return;
    for (const transfer_ref &t : f->in->in->queue)
        if (t->in == f->in && !t->done && (t->kind == BULK_LOAD || t->kind == SEND))
            emu_fail("a block ends while %s to its shared memory is under way",
                     t->kind == SEND ? "a send" : "a bulk copy");
}

/* ---- wgmma ----------------------------------------------------------------------------------- */

/* Address of value (row, k) of an operand: hopper.cuh says how it lies. */
static char *operand_at(const struct transfer *t, uint64_t tile, bool mn, int row, int k)
{
    uint32_t start = (uint32_t)(tile & 0x3FFF) << 4, leading = (uint32_t)(tile >> 16 & 0x3FFF) << 4,
             stride = (uint32_t)(tile >> 32 & 0x3FFF) << 4;
    bool swizzled = tile >> 62 == 1;
    uint32_t plain = start + (uint32_t)(row / 8) * stride + (uint32_t)(k / 8) * leading + (uint32_t)(row % 8) * 16 +
                     (uint32_t)(k % 8) * 2;
    uint32_t at = !swizzled ? plain
                  : mn ? start + (uint32_t)(row / 64) * leading + (uint32_t)(k / 8) * stride + (uint32_t)(k % 8) * 128 +
                             (uint32_t)(row % 64) * 2
                       : start + (uint32_t)(row / 8) * stride + (uint32_t)(row % 8) * 128 + (uint32_t)k * 2;
    at ^= swizzled ? (at >> 7 & 7) << 4 : 0;
    if (at < WINDOW_START || at - WINDOW_START + 2 > t->in->shared_bytes + 1024)
        emu_fail("wgmma reads %#x, outside of the block's shared memory", at);
    return t->in->shared + (at - WINDOW_START);
}
static float operand(const struct transfer *t, uint64_t tile, bool mn, int row, int k)
{
    uint16_t v;
    memcpy(&v, operand_at(t, tile, mn, row, k), sizeof v);
    return __uint_as_float((uint32_t)v << 16);
}
/* The same of FP8 codes, K-major and swizzled: a line is 128 of them, which lie like 64 values of two bytes. */
static float code_operand(const struct transfer *t, uint64_t tile, int row, int k, enum dtype type)
{
    return f8_to_f32((uint8_t)operand_at(t, tile, false, row, k / 2)[k % 2], type);
}
/* 8 values that lie together at a time. */
static void watch_operand(const struct transfer *t, uint64_t tile, bool mn, int rows)
{
    for (int row = 0; row < rows; row += mn ? 8 : 1)
        for (int k = 0; k < 16; k += mn ? 1 : 8)
            watch_async_read(operand_at(t, tile, mn, row, k), 16, "wgmma");
}

/* Value (row, k) of an operand in registers: hopper.cuh says who holds it. */
static float left_operand(const struct transfer *t, int row, int k)
{
    int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, reg = row % 16 / 8 + k / 8 * 2;
    return __uint_as_float((t->left[(size_t)thread][reg] >> (k % 2 * 16) & 0xffff) << 16);
}

static void run_wgmma(struct transfer *t)
{
    static thread_local float a[64][32], b[32][256], sum[64][256];
    int depth = t->codes ? 32 : 16;
    enum dtype left_type = t->a_e5m2 ? DT_F8_E5M2 : DT_F8_E4M3;
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < depth; k++)
            a[i][k] = t->codes          ? code_operand(t, t->a, i, k, left_type)
                      : t->left.empty() ? operand(t, t->a, t->a_mn, i, k)
                                        : left_operand(t, i, k);
    for (int k = 0; k < depth; k++)
        for (int j = 0; j < t->n; j++)
            b[k][j] = t->codes ? code_operand(t, t->b, j, k, DT_F8_E4M3) : operand(t, t->b, t->b_mn, j, k);
    for (int i = 0; i < 64; i++) {
        memset(sum[i], 0, sizeof sum[i]);
        for (int k = 0; k < depth; k++)
            for (int j = 0; j < t->n; j++)
                sum[i][j] += a[i][k] * b[k][j];
    }
    for (int thread = 0; thread < 128; thread++) {
        int w = thread / 32, g = thread % 32 / 4, q = thread % 4;
        float *d = t->d[(size_t)thread];
        for (int j = 0; j < t->n / 2; j++) {
            float v = sum[16 * w + g + 8 * (j / 2 % 2)][8 * (j / 4) + 2 * q + j % 2];
            d[j] = t->first ? v : d[j] + v;
        }
    }
    t->done = true;
    t->group->done++;
}

/* Products of a group happen in order: those up to number n. */
static void run_until(struct group *g, uint64_t n)
{
    while (g->done < n && !g->queue.empty() && g->queue.front()->came == 128) {
        run_wgmma(g->queue.front().get());
        g->queue.pop_front();
        g->first++;
    }
}

/* codes: FP8, of which the left are E5M2 if a_e5m2. */
static void ask_wgmma(float *d, int n, const uint32_t *left, uint64_t a, uint64_t b, bool a_mn, bool b_mn, bool first,
                      bool codes = false, bool a_e5m2 = false)
{
    struct fiber *f = self();
    struct group *g = f->warp->group;
    size_t at = (size_t)(f->wgmmas++ - g->first);
    if ((left == NULL && a >> 62 != 1) || (b >> 62 != 1 && (b >> 62 != 0 || b_mn)))
        emu_fail("wgmma: only tiles with the 128-byte swizzle, and K-major right operands without one, are emulated");
    while (g->queue.size() <= at) {
        transfer_ref t = transfer_new(WGMMA);
        t->group = g;
        t->d.resize(128);
        g->queue.push_back(t);
    }
    struct transfer *t = g->queue[at].get();
    if (t->came == 0) {
        t->a = a;
        t->b = b;
        t->n = n;
        t->a_mn = a_mn;
        t->b_mn = b_mn;
        t->first = first;
        t->codes = codes;
        t->a_e5m2 = a_e5m2;
        if (left == NULL)
            watch_operand(t, a, a_mn, 64);
        else
            t->left.resize(128);
        watch_operand(t, b, b_mn, n);
    } else if (t->left.empty() != (left == NULL) || t->a != a || t->b != b || t->n != n || t->a_mn != a_mn ||
               t->b_mn != b_mn || t->first != first || t->codes != codes || t->a_e5m2 != a_e5m2) {
        emu_fail("wgmma: the threads of a warpgroup ask for different products");
    }
    unsigned thread = f->thread.x + blockDim.x * (f->thread.y + blockDim.y * f->thread.z);
    t->d[thread % 128] = d;
    if (left != NULL)
        t->left[thread % 128] = left;
    t->came++;
    if (t->came < 128)
        return;
    if (here()->draws.below(2) == 0)
        run_until(g, g->first + at + 1); /* at once; or when someone waits */
    for (struct fiber *w : g->waiting)
        wake(w);
    g->waiting.clear();
}
void emu_wgmma(float *d, int n, uint64_t a, uint64_t b, bool a_mn, bool b_mn, bool first)
{
    NOTE_PLACE();
    ask_wgmma(d, n, NULL, a, b, a_mn, b_mn, first);
}
void emu_wgmma_left(float *d, int n, const uint32_t *a, uint64_t b, bool b_mn, bool first)
{
    NOTE_PLACE();
    ask_wgmma(d, n, a, 0, b, false, b_mn, first);
}
void emu_wgmma8(float *d, uint64_t a, uint64_t b, bool a_e5m2, bool first); /* ops/cuda/hopper8.cuh */
void emu_wgmma8(float *d, uint64_t a, uint64_t b, bool a_e5m2, bool first)
{
    NOTE_PLACE();
    ask_wgmma(d, 128, NULL, a, b, false, false, first, true, a_e5m2);
}
void emu_wgmma_commit(void) { self()->wgmma_groups.push_back(self()->wgmmas); }
void emu_wgmma_wait(int left)
{
    NOTE_PLACE();
    struct fiber *f = self();
    struct group *g = f->warp->group;
    while (f->wgmma_groups.size() > (size_t)left) {
        uint64_t n = f->wgmma_groups.front();
        f->wgmma_groups.pop_front();
        for (run_until(g, n); g->done < n; run_until(g, n)) {
            g->waiting.push_back(f); /* the others of the group have yet to come */
            wait_here("wgmma: other warps of the group", g, n);
        }
    }
}
