/* gmm in bf16 by the tensor cores of compute capability 9.0 (wgmma m64n256k16, fp32 accumulators), large tiles only.
 *
 * The same blocks, tiles and stream of stages as in gmm_mma.cu; here the tensor cores read both operands from shared memory
 * themselves, in the layout that gmm_stream.cuh writes. Two groups of four warps take 64 rows of the tile each. Products are
 * asynchronous: while those of one stage run, copies two stages ahead are started. A stage is written again only when
 * every warp has seen the products that read it finished, which is why the ring has two stages more than copies ahead. */
#include "ops/gmm/gmm_stream.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif

typedef shape<GMM_TILE_LARGE> S;
enum { GROUP_ROWS = 64, AHEAD = 2, BLOCKS = 32, LATE = 8 }; /* BLOCKS of eight columns; LATE: stages left when old gradients are asked for */
static_assert(S::THREADS == 256 && S::BM == 2 * GROUP_ROWS && S::BN == 8 * BLOCKS && S::STAGES == AHEAD + 2, "what this kernel is written for");

/* What a tensor core needs to know of an operand: address, distances in units of 16 bytes, 128-byte swizzle. Depth
 * contiguous: `stride` is from eight rows to the next eight. Panels: `stride` from eight steps of depth to the next eight,
 * `leading` from one panel to the next. */
__device__ __forceinline__ uint64_t descriptor(uint32_t at)
{
    uint64_t leading = PANEL_BYTES / 16, stride = 8 * ROW_BYTES / 16;
    return (uint64_t)((at & 0x3FFFF) >> 4) | leading << 16 | stride << 32 | (uint64_t)1 << 62;
}

#if HOPPER_CODE
/* c += A (64 x 16) B (16 x 256); PANELS: the operand lies in panels. */
template <bool A_PANELS, bool B_PANELS> __device__ __forceinline__ void multiply(float c[BLOCKS][4], uint64_t a, uint64_t b)
{
#define ROW(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ROWS(i) ROW(i), ROW(i + 1), ROW(i + 2), ROW(i + 3), ROW(i + 4), ROW(i + 5), ROW(i + 6), ROW(i + 7)
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, 1, 1, 1, %130, %131;"
                 : ROWS(0), ROWS(8), ROWS(16), ROWS(24)
                 : "l"(a), "l"(b), "n"(A_PANELS ? 1 : 0), "n"(B_PANELS ? 1 : 0));
#undef ROWS
#undef ROW
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
/* What this thread copied becomes visible to the tensor cores. */
__device__ __forceinline__ void copies_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int PRODUCT> __device__ __forceinline__ void multiply_stage(float c[BLOCKS][4], uint32_t stage)
{
    constexpr bool A_PANELS = PRODUCT == GMM_WEIGHT, B_PANELS = PRODUCT != GMM_FORWARD;
    /* Rows of the group, or its panel: 8192 bytes apart either way. */
    uint64_t a = descriptor(stage + threadIdx.x / 128 * PANEL_BYTES), b = descriptor(stage + S::A_BYTES);
    products_begin();
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        multiply<A_PANELS, B_PANELS>(c, a + k * (A_PANELS ? 16 * ROW_BYTES / 16 : 2), b + k * (B_PANELS ? 16 * ROW_BYTES / 16 : 2));
    products_commit();
}

template <int PRODUCT> __device__ __forceinline__ void store_tile(const struct gmm_job &p, const struct gmm_at &at, const float c[BLOCKS][4], char *out)
{
    int r0 = threadIdx.x / 128 * GROUP_ROWS + threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; i += PIECE_BLOCKS) {
        if (PRODUCT == GMM_WEIGHT)
            store_gradient(p, at, c + i, r0, 8 * i);
        else
            store_rows<PRODUCT>(p, at, c + i, r0, 8 * i, out);
    }
}
#endif

template <int PRODUCT> __global__ void __launch_bounds__(S::THREADS, 1) wgmma_product(struct gmm_job p)
{
#if HOPPER_CODE
    extern __shared__ __align__(1024) char shared[];
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared), end = ring + S::STAGES * S::STAGE_BYTES;
    struct gmm_table t = gmm_table_make<PRODUCT, S::BM, S::BN>(p, (int *)(shared + S::BYTES));
    char *out = shared + S::STAGES * S::STAGE_BYTES + threadIdx.x / 32 * S::OUT_BYTES;
    uint32_t reading = ring, writing = ring;
    struct stream in;
    in.tile = blockIdx.x;
    stream_open<GMM_TILE_LARGE, PRODUCT>(&in, p, t);
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
#pragma unroll
        for (int q = 0; q < STEPS; q++)
            stream_copy<GMM_TILE_LARGE, PRODUCT>(in, writing, q);
        stream_advance<GMM_TILE_LARGE, PRODUCT>(&in, p, t);
        copies_commit();
        writing += S::STAGE_BYTES;
    }
    for (int tile = blockIdx.x; tile < t.total; tile += gridDim.x) {
        struct gmm_at at = in.depth > 0 && in.tile == tile ? in.at : gmm_find<PRODUCT, S::BM, S::BN>(p, t, tile);
        float c[BLOCKS][4];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                c[i][v] = 0;
        int left = at.depth, late = PRODUCT == GMM_WEIGHT && p.acc && at.depth > 0 ? LATE * DEPTH : 0;
        for (int part = PRODUCT == GMM_WEIGHT ? 0 : 1; part < 2; part++) {
            for (; left > (part == 0 ? late : 0); left -= DEPTH) {
                copies_wait<AHEAD - 1>();
                copies_publish();
                __syncthreads(); /* the stage is there; and all warps have waited for the products before the last */
                multiply_stage<PRODUCT>(c, reading);
#pragma unroll
                for (int q = 0; q < STEPS; q++)
                    stream_copy<GMM_TILE_LARGE, PRODUCT>(in, writing, q);
                stream_advance<GMM_TILE_LARGE, PRODUCT>(&in, p, t);
                copies_commit();
                reading = reading + S::STAGE_BYTES == end ? ring : reading + S::STAGE_BYTES;
                writing = writing + S::STAGE_BYTES == end ? ring : writing + S::STAGE_BYTES;
                products_wait<1>();
            }
#pragma unroll
            for (int q = 0; q < STEPS; q++)
                if (part == 0 && late > 0)
                    prefetch_gradient<S::BM, S::BN, S::THREADS>(p, at, q);
        }
        products_wait<0>();
        store_tile<PRODUCT>(p, at, c, out);
    }
    copies_wait<0>();
#endif
}

template <int PRODUCT> static int launch(struct lane *l, const struct gmm_job *p, int64_t tiles)
{
    size_t shared = S::BYTES + gmm_table_bytes(p->experts);
    NEEDS_SMEM(l, wgmma_product<PRODUCT>, shared);
    LAUNCH(l, wgmma_product<PRODUCT>, (unsigned)min_i64(tiles, cuda_of(l)->sm_count), S::THREADS, shared, *p);
    return ST_OK;
}

extern "C" int gmm_hopper(struct lane *l, const struct gmm_job *p, enum gmm_product product, int64_t tiles)
{
    return product == GMM_FORWARD ? launch<GMM_FORWARD>(l, p, tiles)
           : product == GMM_INPUT ? launch<GMM_INPUT>(l, p, tiles)
                                  : launch<GMM_WEIGHT>(l, p, tiles);
}
