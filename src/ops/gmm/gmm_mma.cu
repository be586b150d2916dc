/* gmm in bf16 by the tensor cores of compute capability 8.0 (mma.sync m16n8k16, fp32 accumulators).
 *
 * A block walks over tiles of the output; its operands come as gmm_stream.cuh says. ldmatrix transposes those that lie
 * in panels. Each element of the output is summed by one thread's accumulator in order of the depth: nothing depends on
 * which block got the tile. */
#include "ops/gmm/gmm_stream.cuh"

template <bool TRANS> __device__ __forceinline__ void load_matrix(uint32_t r[4], uint32_t at)
{
    if (TRANS)
        load_matrices_t(r, at);
    else
        load_matrices(r, at);
}

/* ---- fragments ------------------------------------------------------------------------------- */

/* Where a lane finds its fragments in a stage. A: 16 rows x 16 of depth; B: 16 columns x 16 of depth. first: of the
 * warp's part. Fragment f of depth step k is at: LONG (base + f * 16 rows) ^ (k * 32 bytes), else (base ^ (f * 32
 * bytes)) + k * 16 rows. */
template <bool LONG, bool IS_B> __device__ __forceinline__ uint32_t fragment_base(int first)
{
    int lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2, high = lane / 16;
    if (LONG) {
        int r = first + low + 8 * (IS_B ? high : middle), half = IS_B ? middle : high;
        return (uint32_t)(r * ROW_BYTES + ((half ^ low) << 4));
    }
    int r = low + 8 * (IS_B ? middle : high), half = IS_B ? high : middle;
    return (uint32_t)(first / 64 * PANEL_BYTES + r * ROW_BYTES + (((first % 64 / CHUNK + half) ^ low) << 4));
}
template <bool LONG> __device__ __forceinline__ uint32_t fragment_at(uint32_t base, int f, int k)
{
    return LONG ? (base + f * 16 * ROW_BYTES) ^ (k << 5) : (base ^ (f << 5)) + k * 16 * ROW_BYTES;
}

template <int TILE> struct fragments {
    uint32_t a[shape<TILE>::MI][4], b[shape<TILE>::NI / 2][4];
};

/* The warp's fragments of depth step k of the stage. a_base, b_base: of fragment_base. */
template <int TILE, int PRODUCT>
__device__ __forceinline__ void fragments_load(struct fragments<TILE> *f, uint32_t stage, uint32_t a_base,
                                               uint32_t b_base, int k)
{
    typedef shape<TILE> S;
    constexpr bool A_LONG = PRODUCT != GMM_WEIGHT, B_LONG = PRODUCT == GMM_FORWARD;
#pragma unroll
    for (int i = 0; i < S::MI; i++)
        load_matrix<!A_LONG>(f->a[i], stage + fragment_at<A_LONG>(a_base, i, k));
#pragma unroll
    for (int i = 0; i < S::NI / 2; i++)
        load_matrix<!B_LONG>(f->b[i], stage + fragment_at<B_LONG>(b_base, i, k));
}

/* ---- storing a tile -------------------------------------------------------------------------- */

template <int TILE> struct sums {
    float v[shape<TILE>::MI][shape<TILE>::NI][4];
};

template <int TILE, int PRODUCT>
__device__ __forceinline__ void store_tile(const struct gmm_job &p, const struct gmm_at &at, const struct sums<TILE> &c,
                                           int warp_m, int warp_n, char *out)
{
    typedef shape<TILE> S;
    static_assert(S::NI == PIECE_BLOCKS, "the warp's part is as wide as a piece");
#pragma unroll
    for (int i = 0; i < S::MI; i++) {
        if (PRODUCT == GMM_WEIGHT)
            store_gradient(p, at, c.v[i], warp_m * S::WM + i * 16, warp_n * S::WN);
        else
            store_rows<PRODUCT>(p, at, c.v[i], warp_m * S::WM + i * 16, warp_n * S::WN, out);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int TILE, int PRODUCT>
__global__ void __launch_bounds__(shape<TILE>::THREADS, shape<TILE>::BLOCKS) mma_product(struct gmm_job p)
{
    typedef shape<TILE> S;
    DYNAMIC_SHARED(char, shared, 1024);
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared);
    struct gmm_table t = gmm_table_make<PRODUCT, S::BM, S::BN>(p, (int *)(shared + S::BYTES));
    int warp = threadIdx.x / 32, warp_m = warp % S::WARPS_M, warp_n = warp / S::WARPS_M;
    char *out = shared + S::STAGES * S::STAGE_BYTES + warp * S::OUT_BYTES;
    uint32_t a_base = fragment_base<PRODUCT != GMM_WEIGHT, false>(warp_m * S::WM);
    uint32_t b_base = fragment_base<PRODUCT == GMM_FORWARD, true>(warp_n * S::WN) + S::A_BYTES;

    struct stream in;
    in.tile = blockIdx.x;
    stream_open<TILE, PRODUCT>(&in, p, t);
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
#pragma unroll
        for (int q = 0; q < STEPS; q++)
            stream_copy<TILE, PRODUCT>(in, ring + s * S::STAGE_BYTES, q);
        stream_advance<TILE, PRODUCT>(&in, p, t);
        copies_commit();
    }
    copies_wait<S::STAGES - 2>();
    __syncthreads();
    uint32_t reading = ring, writing = ring + (S::STAGES - 1) * S::STAGE_BYTES, end = ring + S::STAGES * S::STAGE_BYTES;
    struct fragments<TILE> f[2];
    fragments_load<TILE, PRODUCT>(&f[0], reading, a_base, b_base, 0);

    for (int tile = blockIdx.x; tile < t.total; tile += gridDim.x) {
        struct gmm_at at = in.depth > 0 && in.tile == tile ? in.at : gmm_find<PRODUCT, S::BM, S::BN>(p, t, tile);
        struct sums<TILE> c;
#pragma unroll
        for (int i = 0; i < S::MI; i++)
#pragma unroll
            for (int j = 0; j < S::NI; j++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    c.v[i][j][v] = 0;
        for (int left = at.depth; left > 0; left -= DEPTH) {
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                stream_copy<TILE, PRODUCT>(in, writing, k);
                if (k == STEPS - 1) {
                    stream_advance<TILE, PRODUCT>(&in, p, t);
                    copies_commit();
                    copies_wait<S::STAGES - 2>();
                    __syncthreads(); /* the next stage is there, and no thread reads this one again */
                    writing = reading;
                    reading = reading + S::STAGE_BYTES == end ? ring : reading + S::STAGE_BYTES;
                }
                fragments_load<TILE, PRODUCT>(&f[(k + 1) % 2], reading, a_base, b_base, (k + 1) % STEPS);
#pragma unroll
                for (int i = 0; i < S::MI; i++)
#pragma unroll
                    for (int j = 0; j < S::NI; j++)
                        mma_bf16(c.v[i][j], f[k % 2].a[i], f[k % 2].b[j / 2][j % 2 * 2],
                                 f[k % 2].b[j / 2][j % 2 * 2 + 1]);
            }
        }
        store_tile<TILE, PRODUCT>(p, at, c, warp_m, warp_n, out);
    }
    copies_wait<0>();
}

/* ---- launch ---------------------------------------------------------------------------------- */

template <int TILE, int PRODUCT> static int launch(struct lane *l, const struct gmm_job *p, int64_t tiles)
{
    typedef shape<TILE> S;
    size_t shared = S::BYTES + gmm_table_bytes(p->experts);
    NEEDS_SMEM(l, (mma_product<TILE, PRODUCT>), shared);
    LAUNCH(l, (mma_product<TILE, PRODUCT>), (unsigned)min_i64(tiles, (int64_t)S::BLOCKS * cuda_of(l)->sm_budget),
           S::THREADS, shared, *p);
    return ST_OK;
}

template <int TILE>
static int launch_product(struct lane *l, const struct gmm_job *p, enum gmm_product product, int64_t tiles)
{
    return product == GMM_FORWARD ? launch<TILE, GMM_FORWARD>(l, p, tiles)
           : product == GMM_INPUT ? launch<TILE, GMM_INPUT>(l, p, tiles)
                                  : launch<TILE, GMM_WEIGHT>(l, p, tiles);
}

extern "C" int gmm_mma(struct lane *l, const struct gmm_job *p, enum gmm_product product)
{
    bool ragged = product != GMM_WEIGHT;
    struct gmm_shape s = {ragged ? p->rows : p->down, p->across, p->experts, ragged};
    enum gmm_tile tile = gmm_tile_for(&s, cuda_of(l)->sm_count);
    int64_t room = cuda_of(l)->smem_per_block - (int64_t)gmm_table_bytes(p->experts);
    if (tile == GMM_TILE_LARGE && room >= shape<GMM_TILE_LARGE>::BYTES)
        return launch_product<GMM_TILE_LARGE>(l, p, product, gmm_tiles_most(&s, GMM_TILE_LARGE));
    return launch_product<GMM_TILE_SMALL>(l, p, product, gmm_tiles_most(&s, GMM_TILE_SMALL));
}
