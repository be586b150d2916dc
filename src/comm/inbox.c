/* Letters: bytes sent and not yet received, in the memory they will be received in. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <stdlib.h>

void mail_init(struct mail *m) { *m = (struct mail){.last = &m->first}; }

static void free_list(struct letter *l)
{
    while (l != NULL) {
        struct letter *next = l->next;
        if (l->busy != NULL)
            gpu_comm_event_close(l->busy);
        if (l->gpu)
            gpu_comm_free(l->data);
        else
            free(l->data);
        free(l);
        l = next;
    }
}

void mail_release(struct mail *m)
{
    free_list(m->first);
    free_list(m->spare);
    mail_init(m);
}

int mail_blank(struct mail *m, bool gpu, int64_t bytes, struct letter **out, struct err *e)
{
    for (struct letter **at = &m->spare; *at != NULL; at = &(*at)->next)
        if ((*at)->bytes == bytes && (*at)->gpu == gpu && ((*at)->busy == NULL || gpu_comm_letter_free((*at)->busy))) {
            *out = *at;
            *at = (*out)->next;
            return ST_OK;
        }
    struct letter *l;
    TRY(mem_array((void **)&l, 1, sizeof *l, e));
    l->gpu = gpu;
    l->bytes = bytes;
    size_t size = (size_t)max_i64(bytes, 1);
    int st = gpu ? gpu_comm_alloc(&l->data, (int64_t)size, e) : mem_aligned(&l->data, size, DEV_ALIGN, e);
    if (st != ST_OK) {
        free(l);
        return err_in(e, "a message of %lld bytes", (long long)bytes);
    }
    *out = l;
    return ST_OK;
}

void mail_post(struct mail *m, struct letter *l)
{
    l->next = NULL;
    *m->last = l;
    m->last = &l->next;
}

struct letter *mail_take(struct mail *m, const struct letter *like)
{
    for (struct letter **at = &m->first; *at != NULL; at = &(*at)->next) {
        struct letter *l = *at;
        if (l->comm != like->comm || l->from != like->from || l->to != like->to || l->tag != like->tag || l->host != like->host)
            continue;
        *at = l->next;
        if (m->last == &l->next)
            m->last = at;
        return l;
    }
    return NULL;
}

/* Sizes that come once would pile up: of host memory so many are kept. Those of a GPU belong to captured runs. */
enum { MAX_SPARE = 64 };

void mail_spare(struct mail *m, struct letter *l)
{
    int n = 0;
    struct letter **at = &m->spare, **oldest = NULL;
    for (; *at != NULL; at = &(*at)->next)
        if (!(*at)->gpu) {
            n++;
            oldest = at;
        }
    if (!l->gpu && n >= MAX_SPARE) {
        struct letter *gone = *oldest;
        *oldest = gone->next;
        gone->next = NULL;
        free_list(gone);
    }
    l->next = m->spare;
    m->spare = l;
}

int mail_send_self(struct comm *c, struct lane *l, const void *data, const struct letter_to *to, struct err *e)
{
    struct mail *m = &c->world->mail;
    struct letter *letter;
    TRY(mail_blank(m, on_gpu(l), to->bytes, &letter, e));
    letter->comm = c->id;
    letter->from = letter->to = c->world->rank;
    letter->tag = to->tag;
    letter->host = l == NULL;
    int st = move_bytes(l, letter->data, data, to->bytes, e);
    mail_post(m, letter);
    return st;
}

int mail_recv_self(struct comm *c, struct lane *l, void *data, const struct letter_to *from, struct err *e)
{
    struct mail *m = &c->world->mail;
    int me = c->world->rank;
    struct letter *letter = mail_take(m, &(struct letter){.comm = c->id, .from = me, .to = me, .tag = from->tag, .host = l == NULL});
    if (letter == NULL)
        return err_set(e, ST_INTERNAL, "rank %d receives from itself (tag %d) what it has not sent", me, from->tag);
    int st = ST_OK;
    if (letter->bytes != from->bytes)
        st = err_set(e, ST_INTERNAL, "rank %d sent itself %lld bytes (tag %d) and receives %lld", me, (long long)letter->bytes, from->tag,
                     (long long)from->bytes);
    else
        st = move_bytes(l, data, letter->data, from->bytes, e);
    mail_spare(m, letter);
    return st;
}
