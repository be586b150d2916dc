/* braid bench train with optim.offload: how much of the state's transfer is hidden, from three times of the same run
 * (steps as they are, steps that leave the update out, the update alone), and the rates of the link to host memory. */
#include "cmd/cmd.h"
#include "dev/host.h"

/* A step whose update is left out: parameters stay as they are, only the time matters. */
static int step_without(struct trainer *t, double *seconds, struct err *e)
{
    struct step_result r;
    t->pending = false;
    TRY(trainer_step(t, &r, e));
    *seconds = r.seconds;
    return ST_OK;
}

static int update_alone(struct trainer *t, double *seconds, struct err *e)
{
    TRY(t->dev.vt->sync(&t->dev, e));
    double begin = time_now();
    t->pending = true;
    TRY(trainer_settle(t, e));
    TRY(t->dev.vt->sync(&t->dev, e));
    *seconds = time_now() - begin;
    return ST_OK;
}

int bench_offload(struct trainer *t, double step, struct err *e)
{
    enum { REPEATS = 3 }; /* the first runs step by step, the second is captured */
    const int64_t piece = t->dev.kind == DEV_CUDA ? 256 << 20 : 4 << 20;
    bool beside = t->optim.beside.name != NULL;
    double without = 0, alone = 0, moved = optim_moved(&t->optim);
    struct link_rates link = {0};
    struct buf line;
    if (t->optim.n_buckets == 0)
        return ST_OK;
    for (int i = 0; i < REPEATS; i++)
        TRY(update_alone(t, &alone, e));
    for (int i = 0; i < REPEATS && beside; i++)
        TRY(step_without(t, &without, e));
    if (!beside)
        without = step - alone;
    t->pending = false;
    TRY(dev_link_rates(&t->dev, piece, &link, e));
    if (!trainer_is_rank0(t))
        return ST_OK;
    double exposed = step > without ? step - without : 0;
    buf_init(&line, 0);
    optim_print(&t->optim, &t->model, &line);
    int st = buf_check(&line, e);
    if (st == ST_OK)
        printf("%shost_link_gb_per_s: %.1f to the device, %.1f from it, %.1f each way at once\n"
               "update_alone_ms: %.2f (%.2f GB each way, %.1f GB/s)\n"
               "step_without_update_ms: %.2f\nexposed_ms: %.2f\nhidden_percent: %.1f\n",
               line.text, link.in * 1e-9, link.out * 1e-9, link.both * 1e-9, alone * 1e3, moved * 1e-9,
               moved / alone * 1e-9, without * 1e3, exposed * 1e3, exposed < alone ? 100 * (1 - exposed / alone) : 0.0);
    buf_release(&line);
    return st;
}
