/* Tensor maps for bulk copies, made on the host; see hopper.cuh. The encoder lives in the driver and is found at run time. */
#include "ops/cuda/hopper.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

/* parts 0: no third dimension. */
static int encode(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols, int64_t stride, int box_rows)
{
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    TRY(cuda_status(l->err, (int)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
                    "finding cuTensorMapEncodeTiled"));
    if (found != cudaDriverEntryPointSuccess || entry == NULL)
        return err_set(l->err, ST_UNSUPPORTED, "the driver lacks cuTensorMapEncodeTiled");
    const cuuint64_t dims[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)parts}, strides[2] = {(cuuint64_t)stride * 2, (cuuint64_t)cols * 2};
    const cuuint32_t box[3] = {64, (cuuint32_t)box_rows, (cuuint32_t)parts}, steps[3] = {1, 1, 1};
    CUresult code = ((encode_fn)entry)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, parts > 0 ? 3 : 2, (void *)data, dims, strides, box, steps,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? ST_OK
                                : err_set(l->err, ST_INTERNAL, "tensor map of [%lld, %lld] with stride %lld and %d rows: driver error %d",
                                          (long long)rows, (long long)cols, (long long)stride, box_rows, (int)code);
}

int tensor_map_2d(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int64_t stride, int box_rows)
{
    return encode(l, map, data, rows, 0, cols, stride, box_rows);
}

int tensor_map_parts(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols, int64_t stride, int box_rows)
{
    return encode(l, map, data, rows, parts, cols, stride, box_rows);
}
