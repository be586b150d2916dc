/* The emulated multiprocessor as device code sees it. Every thread of a block, and of all blocks of its cluster, is a
 * fiber of one OS thread; clusters are spread over OS threads. A fiber runs until it waits; who runs next is drawn from
 * the seed (BRAID_EMU_SEED). Copies by hardware (cp.async, bulk copies, sends in a cluster, wgmma) are queued and
 * happen at a later time, drawn too, but before a wait that covers them returns. See README.md for what is checked and
 * what cannot be seen. */
#ifndef BRAID_EMU_H
#define BRAID_EMU_H

struct emu_warp;
struct emu_block;
struct emu_cluster;

struct emu_thread {
    uint3 thread, block;
    int lane;
    unsigned warp_mask; /* lanes that exist */
};
extern __thread struct emu_thread *emu_self;

/* Stops the launch with a message that names block, thread and place. */
[[noreturn]] void emu_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Others may run now. */
void emu_yield(void);
/* What this thread wrote to shared memory, and what it knows of, may be read by bulk stores and wgmma. */
void emu_fence_async(void);
/* Sometimes: at places where a real thread would be overtaken. */
void emu_maybe_yield(void);

/* ---- a warp meets ---------------------------------------------------------------------------- */

enum emu_kind {
    EMU_SYNCWARP,
    EMU_SHUFFLE,
    EMU_VOTE,
    EMU_MATCH,
    EMU_REDUCE,
    EMU_LOAD_MATRICES,
    EMU_STORE_MATRICES,
    EMU_TRANSPOSE,
    EMU_MMA
};
enum { EMU_GIVEN = 64 };
struct emu_meeting {
    unsigned mask, came, left; /* lanes */
    enum emu_kind kind;
    alignas(16) unsigned char given[32][EMU_GIVEN];
};
/* All lanes of the mask call it, of the same kind. Returns when all have come, and after `all` has run once, which may
 * change what was given into results. The result is this lane's to read until it meets again. */
const struct emu_meeting *emu_meet(unsigned mask, enum emu_kind kind, const void *give, size_t bytes,
                                   void (*all)(struct emu_meeting *));

/* ---- barriers of a block and of a cluster ---------------------------------------------------- */

void emu_block_barrier(void);
void emu_named_barrier(int id, int threads, bool wait);
void emu_cluster_barrier(void);
unsigned emu_cluster_rank(void);
unsigned emu_cluster_size(void);

/* ---- shared memory --------------------------------------------------------------------------- */

void *emu_dynamic_shared(size_t align);
/* Addresses as instructions take them: block of the cluster in the upper byte, then as in the block's window. */
unsigned emu_shared_address(const void *p);
void *emu_shared_pointer(unsigned address);
unsigned emu_shared_address_in(const void *p, unsigned rank);

/* ---- mbarrier -------------------------------------------------------------------------------- */

void emu_mbarrier_init(uint64_t *bar, unsigned arrivals);
void emu_mbarrier_arrive(uint64_t *bar, unsigned count, int64_t expect_bytes);
void emu_mbarrier_arrive_at(unsigned bar, unsigned count, int64_t expect_bytes); /* in any block of the cluster */
void emu_mbarrier_wait(uint64_t *bar, unsigned parity);
bool emu_mbarrier_test(uint64_t *bar, unsigned parity);

/* ---- asynchronous copies --------------------------------------------------------------------- */

struct CUtensorMap_st;
void emu_copy_async(void *shared, const void *global, int bytes, int valid);
void emu_copies_commit(void);
void emu_copies_wait(int left);

void emu_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *bar);
void emu_bulk_store(void *global, const void *shared, unsigned bytes);
void emu_bulk_add(float *global, const float *shared, unsigned bytes);
void emu_tensor_load(void *shared, const struct CUtensorMap_st *map, int rank, const int *at, uint64_t *bar);
/* To the same place in every block of the mask, with the same mbarrier there. */
void emu_tensor_load_many(void *shared, const struct CUtensorMap_st *map, int rank, const int *at, uint64_t *bar,
                          unsigned blocks);
void emu_tensor_store(const struct CUtensorMap_st *map, int rank, const int *at, const void *shared, bool add);
void emu_bulk_commit(void);
void emu_bulk_wait(int left, bool only_read);
/* 16 bytes to shared memory anywhere in the cluster, with that many bytes for the mbarrier there. */
void emu_send(unsigned shared, const void *bytes16, unsigned bar);

/* ---- wgmma ----------------------------------------------------------------------------------- */

void emu_wgmma(float *d, int n, uint64_t a, uint64_t b, bool a_mn, bool b_mn, bool first);
void emu_wgmma_left(float *d, int n, const uint32_t *a, uint64_t b, bool b_mn, bool first);
void emu_wgmma_commit(void);
void emu_wgmma_wait(int left);

/* ---- launches -------------------------------------------------------------------------------- */

struct emu_launch {
    uint3 grid, block;
    unsigned cluster;
    size_t shared;
    const void *kernel;
    void (*run)(const void *call);
    void *(*copy)(const void *call);
    void (*drop)(void *call);
    const void *call;
};
/* From now on; the first one comes from BRAID_EMU_SEED. */
void emu_set_seed(uint64_t seed);
/* Whether races in shared memory stop a launch; BRAID_EMU_RACES=0 says no. */
void emu_set_races(bool on);
cudaError_t emu_launch_kernel(const struct emu_launch *l);
cudaError_t emu_kernel_attribute(const void *kernel, enum cudaFuncAttribute what, int value);
cudaError_t emu_active_clusters(int *n, const void *kernel, unsigned cluster, unsigned threads, size_t shared);

#endif
