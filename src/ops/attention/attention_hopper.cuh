/* What the attention kernels for Hopper share; see attention_cuda.cuh. */
#ifndef BRAID_OPS_ATTENTION_HOPPER_CUH
#define BRAID_OPS_ATTENTION_HOPPER_CUH

#include "ops/attention/attention_cuda.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/ptx.cuh"

enum { KEYS = 128 /* of a block of keys */, WORKERS = 256 /* threads that multiply */ };

#endif
