/* Memory of the host that a device copies from and to while it computes: pinned for a GPU, plain for a host device.
 * plan.offload and optim.offload use it. */
#ifndef BRAID_DEV_HOST_H
#define BRAID_DEV_HOST_H

#include "dev/dev.h"

int dev_alloc_host(struct dev *d, int64_t bytes, void **out, struct err *e);
void dev_free_host(struct dev *d, void *p);
/* By all threads: a hundred gigabytes are no work for one. */
void dev_zero_host(void *p, int64_t bytes);
/* A copy between any two places, of the device or from dev_alloc_host, in order with what runs on the lane. The host
 * does not wait for it. */
int dev_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e);

/* The same of a GPU. */
int cuda_alloc_host(int64_t bytes, void **out, struct err *e);
void cuda_free_host(void *p);
int cuda_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e);

#endif
