/* Arenas: the memory of a model by purpose, sized first by every plan, then allocated once. */
#ifndef BRAID_PLAN_MEMORY_H
#define BRAID_PLAN_MEMORY_H

#include "dev/dev.h"

enum arena_id {
    ARENA_PARAM,              /* weights */
    ARENA_MASTER,             /* the same in the wide type, where layers work with a narrower copy */
    ARENA_GRAD,               /* main gradients */
    ARENA_OPTIM,              /* optimizer state */
    ARENA_STATE,              /* tables, decode caches, scalars: persistent, neither weight nor gradient */
    ARENA_FRAME,              /* saved slots: a frame per chunk and microbatch in flight */
    ARENA_WORK,               /* transient slots */
    ARENA_CODE,               /* FP8 codes and scales of weights */
    ARENA_COUNT,              /* of the device; those below are host memory */
    ARENA_HOST = ARENA_COUNT, /* offloaded slots */
    ARENA_ALL,
};
const char *arena_name(enum arena_id a);

struct memory {
    int64_t planned[ARENA_ALL];   /* bytes reserved so far */
    int64_t allocated[ARENA_ALL]; /* bytes taken from the device by memory_commit */
    char *base[ARENA_ALL];
    bool away[ARENA_COUNT]; /* lies in host memory, although it is an arena of the device (optim.offload) */
    struct dev *dev;
};
/* Does the arena lie in host memory? */
bool memory_on_host(const struct memory *m, int arena);
/* The sum of sizes[ARENA_ALL] (planned or allocated) that lie on the device, or in host memory. */
int64_t memory_total(const struct memory *m, const int64_t *sizes, bool host);
/* Persistent room; returns its offset in the arena. */
int64_t memory_reserve(struct memory *m, enum arena_id a, int64_t bytes);
/* Frames, workspace and host memory are shared by all plans: the largest wins. */
void memory_reserve_max(struct memory *m, enum arena_id a, int64_t bytes);
/* Allocate everything, once. If the device has too little memory, the error names the sizes. */
int memory_commit(struct memory *m, struct dev *dev, struct err *e);
/* Reallocates frames, workspace and offloaded slots at their new planned size; their contents are lost. All other sizes
 * must be unchanged. */
int memory_renew(struct memory *m, struct err *e);
void memory_release(struct memory *m);
void memory_print(const struct memory *m, struct buf *out);

#endif
