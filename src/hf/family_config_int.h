/* Private to hf/: what the rows of a family cannot say of its config.json, one pair of functions each. */
#ifndef BRAID_HF_FAMILY_CONFIG_INT_H
#define BRAID_HF_FAMILY_CONFIG_INT_H

#include "hf/hf_int.h"

#define HF_FAMILY_CONFIG(name)                                                                                         \
    int name##_read(const struct hf_json *j, struct config *c, struct err *e);                                         \
    int name##_write(const struct config *c, json_t *out, struct err *e)
HF_FAMILY_CONFIG(dense);
HF_FAMILY_CONFIG(qwen2);
HF_FAMILY_CONFIG(qwen3);
HF_FAMILY_CONFIG(qwen3_moe);
HF_FAMILY_CONFIG(mixtral);
HF_FAMILY_CONFIG(qwen3_next);
HF_FAMILY_CONFIG(deepseek);
HF_FAMILY_CONFIG(deepseek_v32);
HF_FAMILY_CONFIG(mamba2);
HF_FAMILY_CONFIG(nemotron);
HF_FAMILY_CONFIG(bamba);
HF_FAMILY_CONFIG(gpt2);
HF_FAMILY_CONFIG(olmoe);
HF_FAMILY_CONFIG(gpt_oss);

#endif
