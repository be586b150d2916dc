/* Fuzzes chat template files: whatever the bytes, a template that is accepted writes any conversation. */
#include "token/chat.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void write_one(const struct chat_template *t, const char *content, size_t n)
{
    struct err e = {0};
    struct tokenizer bytes;
    struct token_encoder *encoder = NULL;
    struct chat_text c;
    struct token_ids ids = {0};
    struct chat_marks marks = {0};
    chat_text_init(&c);
    struct chat_message system = {.role = CHAT_SYSTEM, .text = content, .n = n};
    if (tokenizer_open(&bytes, "bytes", false, &e) != ST_OK || token_encoder_open(&encoder, &bytes, &e) != ST_OK)
        abort();
    (void)chat_text_add(&c, t, &system, false, &e);
    for (int i = 0; i < 4; i++) {
        struct chat_message m = {.role = i == 3  ? CHAT_TOOL
                                         : i % 2 ? CHAT_ASSISTANT
                                                 : CHAT_USER,
                                 .text = content,
                                 .n = n};
        (void)chat_text_add(&c, t, &m, i % 2 == 1, &e);
    }
    if (chat_text_ask(&c, t, &e) == ST_OK && chat_text_encode(&c, &bytes, encoder, &ids, &marks, &e) != ST_OK)
        abort();
    if (ids.n != marks.n || ids.n > c.text.len)
        abort();
    free(ids.ids);
    free(marks.loss);
    chat_text_release(&c);
    token_encoder_close(encoder);
    tokenizer_close(&bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct chat_template t;
    struct err e = {0};
    const char *like;
    char *copy = malloc(size + 1);
    if (copy == NULL)
        return 0;
    if (size > 0)
        memcpy(copy, data, size);
    copy[size] = '\0';
    if (chat_template_parse(&t, copy, size, "fuzz", &e) == ST_OK)
        write_one(&t, copy, size < 64 ? size : 64);
    chat_template_close(&t);
    (void)chat_template_recognise(copy, &like);
    free(copy);
    return 0;
}
