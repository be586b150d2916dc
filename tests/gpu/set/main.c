/* braid and all programs of tests/gpu in one, so that the kernels, which are most of each, are there once: what is
 * called says by its name, a link to this program, which one runs. `make gpu-set` packs it with the links and the
 * scripts. */
#include <stdio.h>
#include <string.h>

#define PROGRAM(name) int name##_main(int argc, char **argv);
PROGRAMS
#undef PROGRAM

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*main)(int argc, char **argv);
    } programs[] = {
#define PROGRAM(name) {#name, name##_main},
        PROGRAMS
#undef PROGRAM
    };
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL, *called = slash ? slash + 1 : argc > 0 ? argv[0] : "";
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(called, programs[i].name) == 0)
            return programs[i].main(argc, argv);
    fprintf(stderr, "gpu-set: there is no program '%s'; it must be called by a link with the name of one:", called);
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        fprintf(stderr, " %s", programs[i].name);
    fprintf(stderr, "\n");
    return 2;
}
