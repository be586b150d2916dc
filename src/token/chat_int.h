/* Private to the files of chat.h. */
#ifndef BRAID_CHAT_INT_H
#define BRAID_CHAT_INT_H

#include "token/chat.h"

struct chat_named {
    const char *name, *text; /* as in a template file */
};
extern const struct chat_named chat_named[];
extern const int chat_n_named;
const char *chat_names_list(void);

#endif
