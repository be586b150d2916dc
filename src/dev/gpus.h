/* How many GPUs this process sees; 0 without a driver, or in a program that was built without CUDA. */
#ifndef BRAID_DEV_GPUS_H
#define BRAID_DEV_GPUS_H

int gpus_visible(void);

#endif
