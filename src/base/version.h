/* Which build this is. */
#ifndef BRAID_BASE_VERSION_H
#define BRAID_BASE_VERSION_H

/* "0.2 (commit 1a2b3c4, gcc 12.2.0, CPU and CUDA)" */
const char *version_text(void);

#endif
