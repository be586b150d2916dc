/* Messages: bytes sent and not yet received, in the memory they will be received in. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <stdlib.h>

void inbox_init(struct inbox *m) { *m = (struct inbox){.last = &m->first}; }

static void free_list(struct message *l)
{
    while (l != NULL) {
        struct message *next = l->next;
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

void inbox_release(struct inbox *m)
{
    free_list(m->first);
    free_list(m->spare);
    inbox_init(m);
}

int inbox_blank(struct inbox *m, bool gpu, int64_t bytes, struct message **out, struct err *e)
{
    for (struct message **at = &m->spare; *at != NULL; at = &(*at)->next)
        if ((*at)->bytes == bytes && (*at)->gpu == gpu && ((*at)->busy == NULL || gpu_comm_message_free((*at)->busy))) {
            *out = *at;
            *at = (*out)->next;
            return ST_OK;
        }
    struct message *l;
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

void inbox_post(struct inbox *m, struct message *l)
{
    l->next = NULL;
    *m->last = l;
    m->last = &l->next;
}

struct message *inbox_take(struct inbox *m, const struct message *like)
{
    for (struct message **at = &m->first; *at != NULL; at = &(*at)->next) {
        struct message *l = *at;
        if (l->comm != like->comm || l->from != like->from || l->to != like->to || l->tag != like->tag ||
            l->host != like->host)
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

void inbox_spare(struct inbox *m, struct message *l)
{
    int n = 0;
    struct message **at = &m->spare, **oldest = NULL;
    for (; *at != NULL; at = &(*at)->next)
        if (!(*at)->gpu) {
            n++;
            oldest = at;
        }
    if (!l->gpu && n >= MAX_SPARE) {
        struct message *gone = *oldest;
        *oldest = gone->next;
        gone->next = NULL;
        free_list(gone);
    }
    l->next = m->spare;
    m->spare = l;
}

int inbox_send_self(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    struct inbox *m = &c->world->inbox;
    struct message *message;
    TRY(inbox_blank(m, on_gpu(l), to->bytes, &message, e));
    message->comm = c->id;
    message->from = message->to = c->world->rank;
    message->tag = to->tag;
    message->host = l == NULL;
    int st = move_bytes(l, message->data, data, to->bytes, e);
    inbox_post(m, message);
    return st;
}

int inbox_recv_self(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    struct inbox *m = &c->world->inbox;
    int me = c->world->rank;
    struct message *message =
        inbox_take(m, &(struct message){.comm = c->id, .from = me, .to = me, .tag = from->tag, .host = l == NULL});
    if (message == NULL)
        return err_set(e, ST_INTERNAL, "rank %d receives from itself (tag %d) what it has not sent", me, from->tag);
    int st = ST_OK;
    if (message->bytes != from->bytes)
        st = err_set(e, ST_INTERNAL, "rank %d sent itself %lld bytes (tag %d) and receives %lld", me,
                     (long long)message->bytes, from->tag, (long long)from->bytes);
    else
        st = move_bytes(l, data, message->data, from->bytes, e);
    inbox_spare(m, message);
    return st;
}
