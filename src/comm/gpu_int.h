/* What comm/ asks of a GPU beyond dev.h; gpu.cu implements it in a CUDA build; in others it is never called, as no GPU
 * can be opened. */
#ifndef BRAID_COMM_GPU_INT_H
#define BRAID_COMM_GPU_INT_H

#include "dev/dev.h"

/* Memory of a GPU as another process may open it: the allocation's handle, a number that no other allocation of the
 * process has or had, its range, and where in it a pointer lies. */
struct gpu_export {
    char handle[64];
    uint64_t id, start, bytes;
    int64_t offset;
};
enum { GPU_ID_BYTES = 16 }; /* of a GPU, whatever numbers processes give it */

#ifdef BRAID_CUDA
int gpu_comm_id(const struct dev *d, char out[GPU_ID_BYTES], struct err *e);
int gpu_comm_export(const void *p, struct gpu_export *out, struct err *e);
int gpu_comm_import(const struct gpu_export *x, void **base, struct err *e);
void gpu_comm_unimport(void *base);
void gpu_comm_peek(const void *p, uint64_t *out); /* 0 where it cannot be read */
int gpu_comm_alloc(void **out, int64_t bytes, struct err *e);
void gpu_comm_free(void *p);
int gpu_comm_copy(struct lane *l, void *dst, const void *src, int64_t bytes);
int gpu_comm_sync(struct lane *l);
/* Has everything given to this device been done? */
int gpu_comm_idle(struct dev *d, bool *idle, struct err *e);
/* out [n] = pieces, n elements apart, summed in order. */
int gpu_comm_sum(struct lane *l, const struct tensor *out, const void *pieces, int n_pieces);
/* The same of bf16 pieces, summed in fp32; add: to what out holds. to: from, rounded. */
int gpu_comm_sum_bf16(struct lane *l, const struct tensor *out, const void *pieces, int n_pieces, bool add);
int gpu_comm_round(struct lane *l, const struct tensor *to, const struct tensor *from);
/* Copies with a few blocks of threads, at a steady rate, and takes latency + seconds at least. */
int gpu_comm_slow_copy(struct lane *l, void *dst, const void *src, int64_t bytes, double latency, double seconds);
/* Streams beside the lanes, for sends that this rank does not wait for. */
void *gpu_comm_stream(struct lane *l);
int gpu_comm_stream_open(void **out, struct err *e);
void gpu_comm_stream_close(void *stream);
int gpu_comm_stream_after(void *stream, struct lane *l); /* what comes next on it waits for the lane */
/* Marks the point where a stream has read a buffer; the event is made at first use. */
int gpu_comm_message_mark(void **event, void *stream, struct err *e);
bool gpu_comm_message_free(void *event);
void gpu_comm_event_close(void *event);
#else
static inline int gpu_comm_none(struct err *e)
{
    return err_set(e, ST_UNSUPPORTED, "this braid was built without CUDA");
}
static inline int gpu_comm_id(const struct dev *d, char out[GPU_ID_BYTES], struct err *e)
{
    return (void)d, (void)out, gpu_comm_none(e);
}
static inline int gpu_comm_export(const void *p, struct gpu_export *out, struct err *e)
{
    return (void)p, (void)out, gpu_comm_none(e);
}
static inline int gpu_comm_import(const struct gpu_export *x, void **base, struct err *e)
{
    return (void)x, (void)base, gpu_comm_none(e);
}
static inline void gpu_comm_unimport(void *base) { (void)base; }
static inline void gpu_comm_peek(const void *p, uint64_t *out) { (void)p, *out = 0; }
static inline int gpu_comm_alloc(void **out, int64_t bytes, struct err *e)
{
    return (void)out, (void)bytes, gpu_comm_none(e);
}
static inline void gpu_comm_free(void *p) { (void)p; }
static inline int gpu_comm_copy(struct lane *l, void *dst, const void *src, int64_t bytes)
{
    return (void)dst, (void)src, (void)bytes, gpu_comm_none(l->err);
}
static inline int gpu_comm_sync(struct lane *l) { return gpu_comm_none(l->err); }
static inline int gpu_comm_idle(struct dev *d, bool *idle, struct err *e)
{
    return (void)d, (void)idle, gpu_comm_none(e);
}
static inline int gpu_comm_sum(struct lane *l, const struct tensor *out, const void *pieces, int n_pieces)
{
    return (void)out, (void)pieces, (void)n_pieces, gpu_comm_none(l->err);
}
static inline int gpu_comm_sum_bf16(struct lane *l, const struct tensor *out, const void *pieces, int n_pieces,
                                    bool add)
{
    return (void)out, (void)pieces, (void)n_pieces, (void)add, gpu_comm_none(l->err);
}
static inline int gpu_comm_round(struct lane *l, const struct tensor *to, const struct tensor *from)
{
    return (void)to, (void)from, gpu_comm_none(l->err);
}
static inline int gpu_comm_slow_copy(struct lane *l, void *dst, const void *src, int64_t bytes, double latency,
                                     double seconds)
{
    return (void)dst, (void)src, (void)bytes, (void)latency, (void)seconds, gpu_comm_none(l->err);
}
static inline void *gpu_comm_stream(struct lane *l) { return (void)l, NULL; }
static inline int gpu_comm_stream_open(void **out, struct err *e) { return (void)out, gpu_comm_none(e); }
static inline void gpu_comm_stream_close(void *stream) { (void)stream; }
static inline int gpu_comm_stream_after(void *stream, struct lane *l) { return (void)stream, gpu_comm_none(l->err); }
static inline int gpu_comm_message_mark(void **event, void *stream, struct err *e)
{
    return (void)event, (void)stream, gpu_comm_none(e);
}
static inline bool gpu_comm_message_free(void *event) { return event == NULL; }
static inline void gpu_comm_event_close(void *event) { (void)event; }
#endif

#endif
