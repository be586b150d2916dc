/* Messages from JSON: OpenAI's form ("messages", role and content) and ShareGPT's ("conversations", from and value). */
#include "token/chat_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGES_MAX = 65536 };

const char *chat_role_name(enum chat_role r)
{
    static const char *const names[CHAT_ROLES] = {"system", "user", "assistant", "tool"};
    return names[r];
}

static bool role_of(const char *name, enum chat_role *out)
{
    static const struct {
        const char *name;
        enum chat_role role;
    } others[] = {{"human", CHAT_USER}, {"gpt", CHAT_ASSISTANT}, {"model", CHAT_ASSISTANT}, {"developer", CHAT_SYSTEM}};
    for (int r = 0; r < CHAT_ROLES; r++)
        if (strcmp(name, chat_role_name((enum chat_role)r)) == 0) {
            *out = (enum chat_role)r;
            return true;
        }
    for (int i = 0; i < countof(others); i++)
        if (strcmp(name, others[i].name) == 0) {
            *out = others[i].role;
            return true;
        }
    return false;
}

int chat_roles_parse(const char *list, unsigned *roles, struct err *e)
{
    *roles = 0;
    for (const char *p = list; *p != '\0';) {
        char word[16];
        enum chat_role r;
        size_t n = strcspn(p, ", ");
        snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), p);
        if (n > 0 && strcmp(word, "all") == 0)
            *roles |= (1u << CHAT_ROLES) - 1;
        else if (n > 0 && role_of(word, &r))
            *roles |= 1u << r;
        else if (n > 0) {
            err_set(e, ST_INVALID, "data.loss_roles: '%s' is no role", word);
            return err_hint(e, "roles are system, user, assistant and tool, separated by commas; or all");
        }
        p += n + (p[n] != '\0');
    }
    return *roles != 0 ? ST_OK : err_set(e, ST_INVALID, "data.loss_roles names no role: nothing would be learned");
}

void chat_list_init(struct chat_list *l)
{
    *l = (struct chat_list){.n = 0};
    arena_init(&l->memory);
}

void chat_list_release(struct chat_list *l)
{
    free(l->m);
    arena_release(&l->memory);
    *l = (struct chat_list){.n = 0};
}

static bool add_message(struct chat_list *l, enum chat_role role, const char *text, size_t n, bool skip, char *why,
                        size_t size)
{
    struct err e;
    char *copy = arena_strndup(&l->memory, "", 0);
    if (n > 0 && (copy = arena_alloc(&l->memory, n + 1)) != NULL)
        memcpy(copy, text, n);
    if (copy == NULL || mem_grow((void **)&l->m, &l->cap, l->n + 1, sizeof *l->m, &e) != ST_OK) {
        snprintf(why, size, "out of memory");
        return false;
    }
    l->m[l->n++] = (struct chat_message){.role = role, .text = copy, .n = n, .skip = skip};
    return true;
}

/* A text, or a list of parts that are all text. */
static bool content_of(const json_t *v, struct buf *out)
{
    const json_t *part;
    size_t i;
    if (json_is_string(v)) {
        buf_add_n(out, json_string_value(v), json_string_length(v));
        return true;
    }
    json_array_foreach(v, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (type == NULL || strcmp(type, "text") != 0 || !json_is_string(text))
            return false;
        buf_add_n(out, json_string_value(text), json_string_length(text));
    }
    return json_array_size(v) > 0;
}

static bool is_empty(const json_t *v)
{
    return v == NULL || json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0);
}

static bool read_message(struct chat_list *l, const json_t *m, size_t i, char *why, size_t size)
{
    static const char *const untold[] = {"tool_calls", "function_call"};
    const json_t *role = json_object_get(m, "role"), *content = json_object_get(m, "content"),
                 *weight = json_object_get(m, "weight");
    enum chat_role r;
    role = role != NULL ? role : json_object_get(m, "from");
    content = content != NULL ? content : json_object_get(m, "value");
    for (int k = 0; k < countof(untold); k++)
        if (!is_empty(json_object_get(m, untold[k]))) {
            snprintf(why, size, "message %zu has %s, which no template here can write", i + 1, untold[k]);
            return false;
        }
    if (!json_is_string(role) || !role_of(json_string_value(role), &r)) {
        snprintf(why, size, "message %zu: role '%.40s' is none of system, user, assistant, tool", i + 1,
                 json_is_string(role) ? json_string_value(role) : "(none)");
        return false;
    }
    if (weight != NULL &&
        !(json_is_number(weight) && (json_number_value(weight) == 0 || json_number_value(weight) == 1))) {
        snprintf(why, size, "message %zu: weight is neither 0 nor 1", i + 1);
        return false;
    }
    struct buf text;
    buf_init(&text, 0);
    bool good = content_of(content, &text);
    if (!good)
        snprintf(why, size, "message %zu: content is no text", i + 1);
    else if (text.failed)
        snprintf(why, size, "out of memory");
    good = good && !text.failed &&
           add_message(l, r, text.text, text.len, weight != NULL && json_number_value(weight) == 0, why, size);
    buf_release(&text);
    return good;
}

bool chat_list_read(struct chat_list *l, const struct json_t *root, const char *field, char *why, size_t size)
{
    bool own = field != NULL && field[0] != '\0' && strcmp(field, "text") != 0;
    const json_t *list = json_object_get(root, own ? field : "messages"), *system = json_object_get(root, "system"), *m;
    size_t i;
    l->n = 0;
    arena_release(&l->memory);
    arena_init(&l->memory);
    if (list == NULL && !own)
        list = json_object_get(root, "conversations");
    if (!json_is_object(root))
        snprintf(why, size, "not a JSON object");
    else if (list == NULL)
        snprintf(why, size, own ? "no field \"%.60s\"" : "neither \"messages\" nor \"conversations\"", field);
    else if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MESSAGES_MAX)
        snprintf(why, size, "the messages are no list of 1 to %d", MESSAGES_MAX);
    else if (!is_empty(json_object_get(root, "tools")))
        snprintf(why, size, "the conversation has tools, which no template here can write");
    else if (!is_empty(system) && !json_is_string(system))
        snprintf(why, size, "\"system\" is no text");
    else {
        if (json_is_string(system) && json_string_length(system) > 0 &&
            !add_message(l, CHAT_SYSTEM, json_string_value(system), json_string_length(system), false, why, size))
            return false;
        json_array_foreach(list, i, m) if (!read_message(l, m, i, why, size)) return false;
        return true;
    }
    return false;
}
