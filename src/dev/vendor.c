/* Vendor libraries are opened at run time: a binary built with CUDA starts, and trains on the CPU, where they are
 * missing. */
#include "dev/vendor.h"

#include <dlfcn.h>

int vendor_open(void **lib, const char *const *names, struct err *e)
{
    const char *why = "no name given";
    for (int i = 0; names[i] != NULL; i++) {
        *lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (*lib != NULL)
            return ST_OK;
        why = dlerror();
    }
    return err_set(e, ST_UNSUPPORTED, "cannot load %s: %s", names[0], why);
}

int vendor_find(void *lib, const struct vendor_symbol *list, int n, struct err *e)
{
    for (int i = 0; i < n; i++) {
        *list[i].where = dlsym(lib, list[i].name);
        if (*list[i].where == NULL)
            return err_set(e, ST_UNSUPPORTED, "the library lacks %s: %s", list[i].name, dlerror());
    }
    return ST_OK;
}

void vendor_close(void *lib)
{
    if (lib != NULL)
        dlclose(lib);
}
