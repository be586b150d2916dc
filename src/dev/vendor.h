/* Opening a vendor's shared library and finding its functions; for dev/ and comm/. */
#ifndef BRAID_DEV_VENDOR_H
#define BRAID_DEV_VENDOR_H

#include "base/base.h"

struct vendor_symbol {
    const char *name;
    void **where;
};
/* The first of the names that loads; names end with NULL. */
int vendor_open(void **lib, const char *const *names, struct err *e);
int vendor_find(void *lib, const struct vendor_symbol *list, int n, struct err *e);
void vendor_close(void *lib);

#endif
