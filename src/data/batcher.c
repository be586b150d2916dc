/* Prefetch: one thread fills a ring of batches in order; the consumer takes them in order. What a
 * batch holds depends only on its number, so the thread cannot change any result.
 *
 * Batch number k lives in slot k % n. The thread may write number `made` while fewer than `ahead`
 * batches wait; the slots of the `keep` batches delivered last are never those. */
#include "data/data_int.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct batcher {
    const struct dataset *ds;
    struct batch_opts opts;
    int64_t first_step;
    struct batch *ring;
    int n;
    pthread_t thread;
    bool running;
    pthread_mutex_t lock; /* guards what follows; a slot's content is handed over by made, taken */
    pthread_cond_t changed;
    int64_t made, taken;
    bool stop;
    int status; /* of the thread; batch number `made` failed with it */
    struct err error;
};

static void *fill_ahead(void *arg)
{
    struct batcher *b = arg;
    int64_t micros = batch_micros_per_step(&b->opts);
    struct err error = {0};
    pthread_mutex_lock(&b->lock);
    while (!b->stop && b->status == ST_OK) {
        if (b->made - b->taken >= b->opts.ahead) {
            pthread_cond_wait(&b->changed, &b->lock);
            continue;
        }
        int64_t k = b->made;
        pthread_mutex_unlock(&b->lock);
        int st = batch_fill(&b->ring[k % b->n], b->ds, &b->opts, b->first_step + k / micros, k % micros, &error);
        pthread_mutex_lock(&b->lock);
        if (st == ST_OK) {
            b->made++;
        } else {
            b->status = st;
            b->error = error;
        }
        pthread_cond_broadcast(&b->changed);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

/* Signals belong to the main thread: the new one starts with all of them blocked. */
static int start_thread(struct batcher *b, struct err *e)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&b->thread, NULL, fill_ahead, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return err_set(e, ST_IO, "cannot start the data thread: %s", strerror(rc));
    b->running = true;
    return ST_OK;
}

int batcher_open(struct batcher **out, const struct dataset *ds, const struct batch_opts *o, int64_t first_step,
                 struct err *e)
{
    *out = NULL;
    TRY(batch_check_opts(o, e));
    if (o->ahead < 1 || o->keep < 1 || o->ahead > 4096 || o->keep > 4096)
        return err_set(e, ST_INVALID, "%d batches ahead and %d kept: each must be in 1..4096", o->ahead, o->keep);
    if (first_step < 0)
        return err_set(e, ST_INVALID, "first step %lld", (long long)first_step);
    struct batcher *b = calloc(1, sizeof *b);
    if (b == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening a batcher");
    b->ds = ds;
    b->opts = *o;
    b->first_step = first_step;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    int st;
    TRY_OUT(mem_array((void **)&b->ring, (size_t)(o->ahead + o->keep), sizeof *b->ring, e));
    while (b->n < o->ahead + o->keep) {
        struct batch *slot = &b->ring[b->n];
        TRY_OUT(batch_alloc(slot, o->micro_batch, dataset_seq(ds), e));
        b->n++;
        TRY_OUT(batch_divide(slot, o->parts, o->part, o->depths, e));
    }
    TRY_OUT(start_thread(b, e));
    *out = b;
    return ST_OK;
out:
    batcher_close(b);
    return st;
}

int batcher_next(struct batcher *b, const struct batch **view, struct err *e)
{
    int st = ST_OK;
    *view = NULL;
    pthread_mutex_lock(&b->lock);
    while (b->made == b->taken && b->status == ST_OK)
        pthread_cond_wait(&b->changed, &b->lock);
    if (b->made > b->taken) {
        *view = &b->ring[b->taken++ % b->n];
        pthread_cond_broadcast(&b->changed);
    } else {
        st = b->status;
        if (e != NULL)
            *e = b->error;
    }
    pthread_mutex_unlock(&b->lock);
    return st;
}

void batcher_close(struct batcher *b)
{
    if (b == NULL)
        return;
    pthread_mutex_lock(&b->lock);
    b->stop = true;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (b->running)
        pthread_join(b->thread, NULL);
    for (int i = 0; i < b->n; i++)
        batch_release(&b->ring[i]);
    free(b->ring);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    free(b);
}
