/* Any bytes as an INI file: no crash; and what is accepted is written and read back unchanged, with
 * and without comments, alone and as the saved config of a checkpoint. */
#include "config/config_int.h"

#include <stdlib.h>

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void reads_back(const struct config *c, bool with_sources)
{
    struct err e = {0};
    struct buf text;
    struct config again, resumed;
    buf_init(&text, 0);
    config_write(c, &text, with_sources);
    must(!text.failed);
    must(config_init(&again, &e) == ST_OK && config_init(&resumed, &e) == ST_OK);
    must(config_read_ini_text(&again, text.text, text.len, "again", &e) == ST_OK);
    must(config_load_saved(&resumed, text.text, text.len, "ck", CFG_SAVED_ALL, NULL, &e) == ST_OK);
    must(config_finish(&again, &e) == ST_OK);
    for (int i = 0; i < config_n_options; i++) {
        must(option_equal(c, &again, &config_options[i]));
        must((config_options[i].flags & OPT_RUN) || option_equal(c, &resumed, &config_options[i]));
    }
    config_release(&again);
    config_release(&resumed);
    buf_release(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err e = {0};
    struct config c;
    must(config_init(&c, &e) == ST_OK);
    int st = config_read_ini_text(&c, (const char *)data, size, "fuzz.ini", &e);
    must((st == ST_OK) == (e.code == ST_OK));
    if (st == ST_OK && config_finish(&c, &e) == ST_OK) {
        reads_back(&c, false);
        reads_back(&c, true);
    }
    config_release(&c);
    return 0;
}
