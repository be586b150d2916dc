/* GGUF files, which llama.cpp and programs built on it run: export only. */
#ifndef BRAID_HF_GGUF_H
#define BRAID_HF_GGUF_H

#include "hf/hf.h"

enum gguf_type { GGUF_F32, GGUF_BF16, GGUF_Q8_0 };               /* of matrices; vectors and routers stay F32 */
bool gguf_type_from_name(const char *name, enum gguf_type *out); /* "f32", "bf16", "q8_0" */

/* The tokenizer as GGUF stores it; all strings live as long as the call. */
struct gguf_vocab {
    const char *model, *pre; /* "gpt2", "llama-bpe" */
    int64_t n, n_merges;
    const char *const *tokens; /* in the byte alphabet of GPT-2 */
    const int32_t *types;      /* 1 ordinary, 3 control, 4 added by the user, 5 unused */
    const char *const *merges; /* "a b" */
    int64_t bos, eos;          /* -1: none */
    bool add_bos;
    const char *chat_template; /* NULL: none */
};
/* x as for hf_export; its path is the file, its dtype and shards are not used. vocab NULL: programs get token numbers
 * only. */
int gguf_export(const struct hf_export *x, enum gguf_type type, const struct gguf_vocab *vocab, struct err *e);

#endif
