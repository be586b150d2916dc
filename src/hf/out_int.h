/* Private to hf/: the tensors of an export. */
#ifndef BRAID_HF_OUT_INT_H
#define BRAID_HF_OUT_INT_H

#include "hf/hf_int.h"

struct hf_out_tensor { /* links [first, end) write into it */
    const char *name;
    struct tensor shape; /* F32, no data */
    bool keep_f32, integers;
    bool codes, scales; /* FP8 blocks (out8.c): stored as codes; the scales of a tensor of shape `of` */
    struct tensor of;
    int first, end;
    int shard;  /* of a folder */
    int64_t at; /* in a GGUF file's data */
};
struct hf_out {
    const struct hf_export *x;
    struct hf_out_tensor *tensors; /* in the order of the parameters */
    int n_tensors;
    /* private */
    struct hf_folder links; /* only what binding needs of a folder */
    float *values;
    size_t values_cap;
};
int hf_out_open(struct hf_out *w, const struct hf_export *x, const struct hf_family *fam, struct err *e);
void hf_out_close(struct hf_out *w);
/* Valid until the next call. */
int hf_out_values(struct hf_out *w, const struct hf_out_tensor *t, float **out, struct err *e);

/* FP8 blocks: marks the tensors that become codes and adds their scales; one tensor's scales and codes; what
 * config.json says. */
int hf_out_codes(struct hf_out *w, struct err *e);
int hf_out_block_scales(const struct tensor *t, const char *name, const float *values, float *out, struct err *e);
void hf_out_block_codes(const struct tensor *t, const float *values, uint8_t *out);
int hf_out_codes_config(const struct hf_out *w, json_t *config, struct err *e);

/* The family that can express a model, and the config.json that says so. */
int hf_choose(const struct config *c, const char *family, enum dtype dtype, const struct hf_family **out, json_t **json,
              struct err *e);

#endif
