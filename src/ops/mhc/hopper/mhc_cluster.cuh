/* What the boundary's single passes share: clusters of blocks, 256 channels of all streams to a block, that walk over
 * tiles of tokens and exchange a few sums for each tile. Private to ops/mhc. See mhc_cluster.cu for the design.
 *
 * The exchange: the receive room of a block is a ring of `slots` slots, each with a piece of every block of the
 * cluster. With every slot go
 *   received  at the receiver: one arrival, that of exchange_expect, and the bytes of all blocks
 *   credit    at the sender: an arrival from every block of the cluster, itself too, that has taken what the slot held
 * A cluster of the device may hold several of those that are meant here (mhc_cluster.cu), so that ranks begin at
 * `first`. A receiver arms `received` for the next round of a slot before it returns the credit of this one, and a
 * sender waits for the credits of the round before: so nothing is overwritten that somebody still needs, and no byte
 * comes before its barrier expects it. */
#ifndef BRAID_OPS_MHC_CLUSTER_CUH
#define BRAID_OPS_MHC_CLUSTER_CUH

#include "ops/mhc/hopper/mhc_pass.cuh"

enum { CLUSTER_MOST = CUDA_MOST_CLUSTER /* more than 8 is not portable, but the H100 and H200 have it */ };

/* How many clusters of `blocks` blocks run at once; 0 where the device has none. The kernel may use that many blocks
 * and that much shared memory afterwards. */
template <typename K>
static int cluster_count(struct lane *l, K kernel, int blocks, int threads, size_t smem, int *count)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    *count = 0;
    if (blocks < 1 || blocks > CLUSTER_MOST)
        return ST_OK;
    TRY(cuda_status(l->err, (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem),
                    "cudaFuncSetAttribute(shared memory)"));
    TRY(cuda_status(l->err, (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    "cudaFuncSetAttribute(cluster size)"));
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)blocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t code = cudaOccupancyMaxActiveClusters(count, kernel, &config);
    if (code == cudaErrorInvalidClusterSize) {
        *count = 0;
        cudaGetLastError(); /* which would turn up later otherwise */
        return ST_OK;
    }
    return cuda_status(l->err, (int)code, "cudaOccupancyMaxActiveClusters");
}

#if HOPPER_CODE

/* By one thread, before cluster_sync: */
INLINE void exchange_init(uint64_t *received, uint64_t *credit, int slots, int blocks, uint32_t bytes)
{
    for (int i = 0; i < slots; i++) {
        barrier_init(&received[i], 1);
        barrier_init(&credit[i], (uint32_t)blocks);
    }
    barrier_init_done();
    for (int i = 0; i < slots; i++)
        barrier_expect(&received[i], bytes);
}
/* Parity of round k of a ring of `many` places: for threads that wait for its k-th item; and for those that wait until
 * the previous item in the same place has been taken (k >= many). */
INLINE uint32_t round_of(int k, int many) { return (uint32_t)(k / many & 1); }
INLINE uint32_t round_before(int k, int many) { return round_of(k, many) ^ 1; }

/* The sender, one warp: until all blocks have taken item k - slots. */
INLINE void exchange_wait_room(uint64_t *credit, int k, int slots)
{
    if (k >= slots)
        barrier_wait_bounded(&credit[k % slots], round_before(k, slots));
}
INLINE void exchange_wait(uint64_t *received, int k, int slots)
{
    barrier_wait_bounded(&received[k % slots], round_of(k, slots));
}
/* The receiver, one whole warp: a lane has the credits of one block. */
INLINE uint32_t exchange_credits(uint64_t *credit, int first, int blocks)
{
    return smem_address_in(credit, (uint32_t)(first + min((int)threadIdx.x % 32, blocks - 1)));
}
/* When its lanes have read item k: the slot is for item k + slots now. Several receivers have a part of the slot and a
 * barrier `received` each, and the same credit (their number times `blocks` for exchange_init). */
INLINE void exchange_taken(uint64_t *received, uint32_t credits, int k, int slots, int blocks, uint32_t bytes)
{
    int lane = (int)threadIdx.x % 32;
    if (lane == 0)
        barrier_expect(&received[k % slots], bytes);
    __syncwarp();
    if (lane < blocks)
        cluster_arrive(credits + (uint32_t)(k % slots * 8));
}

#endif /* HOPPER_CODE */

#endif
