/* Memory of the host that a device copies from and to while it computes: pinned for a GPU, plain for a host device.
 * plan.offload and optim.offload use it. */
#ifndef BRAID_DEV_HOST_H
#define BRAID_DEV_HOST_H

#include "dev/dev.h"

/* Zeroed, by all threads: a hundred gigabytes are no work for one. */
int dev_alloc_host(struct dev *d, int64_t bytes, void **out, struct err *e);
void dev_free_host(struct dev *d, void *p);
/* A copy between any two places, of the device or from dev_alloc_host, in order with what runs on the lane. The host
 * does not wait for it. */
int dev_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e);

/* Bytes per second between the device and host memory: to the device, from it, and of each while both run. Copies of
 * `bytes`; on a host device between two places of its memory. */
struct link_rates {
    double in, out, both; /* both: each of the two directions */
};
int dev_link_rates(struct dev *d, int64_t bytes, struct link_rates *out, struct err *e);

/* The same of a GPU. */
int cuda_alloc_host(int64_t bytes, void **out, struct err *e);
void cuda_free_host(void *p);
int cuda_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e);

#endif
