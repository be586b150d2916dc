/* Tensor maps, as the emulator keeps them: encoded by emu_encode_tiled (async.cc), which the runtime hands out for
 * cuTensorMapEncodeTiled. Numbers of enumerators are ours. */
#ifndef BRAID_EMU_CUDA_H
#define BRAID_EMU_CUDA_H

#include <stdint.h>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef enum { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 } CUtensorMapDataType;
typedef enum { CU_TENSOR_MAP_INTERLEAVE_NONE } CUtensorMapInterleave;
typedef enum { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B } CUtensorMapSwizzle;
typedef enum {
    CU_TENSOR_MAP_L2_PROMOTION_NONE,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B
} CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

typedef struct CUtensorMap_st {
    uint64_t magic;
    char *data;
    uint64_t dim[4], stride[3]; /* in elements; in bytes, of dims 1 and up */
    uint32_t box[4];
    uint16_t rank, type, swizzle, unused;
} __attribute__((aligned(64))) CUtensorMap;
#define CU_TENSOR_MAP_DATA_TYPE_UINT8 ((CUtensorMapDataType)2)

#endif
