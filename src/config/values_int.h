/* What options with a fixed list of values may be, as options.c names them: the texts of the lists in config.h. */
#ifndef BRAID_CONFIG_VALUES_INT_H
#define BRAID_CONFIG_VALUES_INT_H

#include "config/config.h"

#include <stddef.h>

#define VALUE_TEXT(id, text) text,
static const char *const act_values[] = {CONFIG_ACT(VALUE_TEXT) NULL};
static const char *const sink_values[] = {CONFIG_SINK(VALUE_TEXT) NULL};
static const char *const norm_values[] = {CONFIG_NORM(VALUE_TEXT) NULL};
static const char *const qk_norm_values[] = {CONFIG_QK_NORM(VALUE_TEXT) NULL};
static const char *const position_values[] = {CONFIG_POSITION(VALUE_TEXT) NULL};
static const char *const rope_values[] = {CONFIG_ROPE(VALUE_TEXT) NULL};
static const char *const rope_scaling_values[] = {CONFIG_ROPE_SCALING(VALUE_TEXT) NULL};
static const char *const router_values[] = {CONFIG_ROUTER(VALUE_TEXT) NULL};
static const char *const drop_values[] = {CONFIG_DROP(VALUE_TEXT) NULL};
static const char *const mamba_norm_values[] = {CONFIG_MAMBA_NORM(VALUE_TEXT) NULL};
static const char *const mhc_values[] = {CONFIG_MHC(VALUE_TEXT) NULL};
static const char *const mhc_kernels_values[] = {CONFIG_MHC_KERNELS(VALUE_TEXT) NULL};
static const char *const optim_offload_values[] = {CONFIG_OPTIM_OFFLOAD(VALUE_TEXT) NULL};
static const char *const optim_state_values[] = {CONFIG_OPTIM_STATE(VALUE_TEXT) NULL};
static const char *const granularity_values[] = {CONFIG_GRANULARITY(VALUE_TEXT) NULL};
static const char *const init_scale_values[] = {CONFIG_INIT_SCALE(VALUE_TEXT) NULL};
static const char *const schedule_values[] = {CONFIG_SCHEDULE(VALUE_TEXT) NULL};
static const char *const wsd_style_values[] = {CONFIG_WSD_STYLE(VALUE_TEXT) NULL};
static const char *const nonfinite_values[] = {CONFIG_NONFINITE(VALUE_TEXT) NULL};
static const char *const comm_values[] = {CONFIG_COMM(VALUE_TEXT) NULL};
static const char *const overlap_values[] = {CONFIG_OVERLAP(VALUE_TEXT) NULL};
static const char *const reduce_values[] = {CONFIG_REDUCE(VALUE_TEXT) NULL};
static const char *const cp_comm_values[] = {CONFIG_CP_COMM(VALUE_TEXT) NULL};
static const char *const ep_fp8_values[] = {CONFIG_EP_FP8(VALUE_TEXT) NULL};
static const char *const loop_values[] = {CONFIG_LOOP(VALUE_TEXT) NULL};
static const char *const fused_values[] = {CONFIG_FUSED(VALUE_TEXT) NULL};
static const char *const precision_values[] = {CONFIG_PRECISION(VALUE_TEXT) NULL};
static const char *const fp8_recipe_values[] = {CONFIG_FP8_RECIPE(VALUE_TEXT) NULL};
static const char *const fp8_grad_values[] = {CONFIG_FP8_GRAD(VALUE_TEXT) NULL};
static const char *const device_values[] = {CONFIG_DEVICE(VALUE_TEXT) NULL};
static const char *const resume_values[] = {CONFIG_RESUME(VALUE_TEXT) NULL};
static const char *const load_allow_values[] = {CONFIG_LOAD_ALLOW(VALUE_TEXT) NULL};

#endif
