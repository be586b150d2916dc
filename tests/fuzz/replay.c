/* A main for fuzz targets where there is no libFuzzer: feeds each file named on the command line to
 * the target once. Crashes, aborts and sanitizer reports then fail as they do under the fuzzer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { REPLAY_MAX_BYTES = 1 << 20 };

int main(int argc, char **argv)
{
    uint8_t *data = malloc(REPLAY_MAX_BYTES);
    if (data == NULL)
        return 1;
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        if (f == NULL) {
            perror(argv[i]);
            free(data);
            return 1;
        }
        size_t n = fread(data, 1, REPLAY_MAX_BYTES, f);
        fclose(f);
        /* Its own block of exactly n bytes, so that reading past the end is seen by ASan. */
        uint8_t *exact = malloc(n > 0 ? n : 1);
        if (exact == NULL) {
            free(data);
            return 1;
        }
        memcpy(exact, data, n);
        LLVMFuzzerTestOneInput(exact, n);
        free(exact);
    }
    free(data);
    printf("%d inputs\n", argc - 1);
    return 0;
}
