/* Private to hf/: what the rows of a family cannot say of its config.json, one pair of functions each. */
#ifndef BRAID_HF_FAMILY_CONFIG_INT_H
#define BRAID_HF_FAMILY_CONFIG_INT_H

#include "hf/hf_int.h"

#define HF_FAMILY_CONFIG(name)                                                                                         \
    int name##_read(const struct hf_json *j, struct config *c, struct err *e);                                         \
    int name##_write(const struct config *c, json_t *out, struct err *e)
HF_FAMILY_CONFIG(dense);
HF_FAMILY_CONFIG(mistral);
HF_FAMILY_CONFIG(qwen2);
HF_FAMILY_CONFIG(qwen3);
HF_FAMILY_CONFIG(qwen3_moe);
HF_FAMILY_CONFIG(mixtral);
HF_FAMILY_CONFIG(qwen3_next);
HF_FAMILY_CONFIG(deepseek);
HF_FAMILY_CONFIG(deepseek_v32);
HF_FAMILY_CONFIG(deepseek_v4);
HF_FAMILY_CONFIG(mamba2);
HF_FAMILY_CONFIG(nemotron);
HF_FAMILY_CONFIG(bamba);
HF_FAMILY_CONFIG(gpt2);
HF_FAMILY_CONFIG(olmoe);
HF_FAMILY_CONFIG(gpt_oss);

/* ---- patterns, shared by the files of families (family_config.c) ----------------------------- */

enum { HF_MAX_LAYERS = 4096 };
int hf_count_layers(const struct hf_json *j, int64_t *n, struct err *e);
/* The layers of the main part of a pattern, one string each; list is owned. */
struct hf_layers {
    char (*list)[8];
    int64_t n;
};
int hf_split_pattern(const struct config *c, struct hf_layers *out, struct err *e);
/* Writes num_hidden_layers if each layer is one of those allowed. */
int hf_put_layers(json_t *out, const struct hf_layers *l, const char *const *allowed, struct err *e);
/* Multi-token prediction: at most so many depths of these symbols. */
int hf_put_depths(const struct config *c, json_t *out, const char *symbols, int64_t most, struct err *e);
/* Refuses one expert for a token whose score is divided by itself. */
int hf_check_single_expert(const struct hf_json *j, const struct config *c, struct err *e);
int hf_check_limit(const struct hf_json *j, const struct config *c, struct err *e);
int hf_put_positions(const struct config *c, json_t *out, struct err *e);

#endif
