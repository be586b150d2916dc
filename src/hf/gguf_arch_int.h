/* Private to hf/: the architectures of llama.cpp that braid writes. */
#ifndef BRAID_HF_GGUF_ARCH_INT_H
#define BRAID_HF_GGUF_ARCH_INT_H

#include "hf/out_int.h"

enum { GGUF_MAX_ROPE = 2048 };

struct header; /* keys and values of a file; gguf.c */
void gguf_string(struct header *h, const char *name, const char *value);
void gguf_u32(struct header *h, const char *name, int64_t value);
void gguf_f32(struct header *h, const char *name, double value);

struct gguf_arch {
    struct hf_family family; /* its model_type is the architecture's name; only names and rules are used */
    const char *from[4];     /* families of transformers that llama.cpp runs as this one */
};
/* The one that runs a model of these options, or the reason why none does. */
int gguf_arch_of(const struct config *c, const struct gguf_arch **out, struct err *e);
int gguf_arch_keys(const struct gguf_arch *a, const struct config *c, struct header *h, struct err *e);
/* Llama 3's scaling as numbers by which frequencies are divided; returns how many, 0 where there is no such scaling. */
int64_t gguf_rope_divisors(const struct config *c, float out[GGUF_MAX_ROPE]);

#endif
