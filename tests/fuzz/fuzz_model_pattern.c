/* Any bytes as a layer pattern: no crash; what is refused says why; what is accepted can be written
 * again from its parts, and its chunks are the whole pattern, each part once. */
#include "kind/kind.h"
#include "model/pattern.h"

#include <stdlib.h>
#include <string.h>

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void refused_with_reason(int st, enum pattern_error code, const struct err *e)
{
    must(st == ST_USAGE && e->code == ST_USAGE && code != PATTERN_OK && code < PATTERN_ERRORS);
    must(e->msg[0] != '\0' && pattern_error_name(code)[0] == 'E');
}

/* The items and segments, as text, are the main part. */
static void main_is_its_parts(const struct pattern *p)
{
    char text[PATTERN_MAX + 1];
    int n = 0, item = 0, layer = 0;
    for (int s = 0; s < p->n_segments; s++) {
        if (s > 0)
            text[n++] = '|';
        must(p->segments[s].first_item == item && p->segments[s].first_layer == layer);
        for (int i = item; i < item + p->segments[s].n_items; i++) {
            const struct pattern_item *it = &p->items[i];
            must(it->first == layer && it->n >= 1 && (it->grouped || it->n == 1));
            if (it->grouped)
                text[n++] = '[';
            for (int l = 0; l < it->n; l++, layer++) {
                must(p->item_of[layer] == i && p->at[layer] == n && p->text[n] == p->symbols[layer]);
                text[n++] = p->symbols[layer];
            }
            if (it->grouped)
                text[n++] = ']';
        }
        item += p->segments[s].n_items;
    }
    must(item == p->n_items && layer == p->n_layers && n == p->main_len && memcmp(text, p->text, (size_t)n) == 0);
    must(p->symbols[layer] == '\0' && (int)strlen(p->mtp_symbols) == p->n_mtp_layers);
    must((p->n_mtp_layers > 0) == (p->n_mtp_depths > 0));
}

/* All ranks and stages together: refused by all for one reason, or the pattern in order. */
static void chunks_are_the_whole(const struct pattern *p, int size, int first, int last)
{
    int item = 0, layer = 0, stages, refused = 0;
    enum pattern_error code;
    struct err e = {0};
    if (pattern_virtual_stages(p, size, &stages, &code, &e) != ST_OK) {
        refused_with_reason(ST_USAGE, code, &e);
        return;
    }
    for (int k = 0; k < size * (stages > 0 ? stages : 1); k++) {
        struct pattern_place at = {k % size, size, stages > 0 ? k / size : PATTERN_NOT_GIVEN, first, last};
        struct pattern_chunk c;
        int st = pattern_choose(p, &at, &c, &e);
        if (st != ST_OK) {
            refused_with_reason(st, c.error, &e);
            refused++;
            continue;
        }
        must(refused > 0 || (c.part.first_item == item && c.part.first_layer == layer));
        item += c.part.n_items;
        layer += c.part.n_layers;
    }
    must(refused > 0 || (item == p->n_items && layer == p->n_layers));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err e = {0};
    struct pattern *p = malloc(sizeof *p);
    char *text = malloc(size + 1);
    must(p != NULL && text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    int st = pattern_parse_segment(p, text, &e);
    if (st == ST_OK)
        main_is_its_parts(p);
    else
        refused_with_reason(st, p->error, &e);
    st = pattern_parse(p, text, &e);
    if (st == ST_OK) {
        main_is_its_parts(p);
        for (int ranks = 1; ranks <= 5; ranks++) {
            chunks_are_the_whole(p, ranks, PATTERN_NOT_GIVEN, PATTERN_NOT_GIVEN);
            chunks_are_the_whole(p, ranks, (int)(size % 7), PATTERN_NOT_GIVEN);
            chunks_are_the_whole(p, ranks, (int)(size % 3), (int)(size % 5));
        }
        int n_kinds, sum = 0;
        const struct core_kind *const *cores = core_kinds(&n_kinds);
        for (int k = 0; k < n_kinds; k++)
            sum += pattern_map(p->symbols, cores[k]->symbol, NULL) +
                   pattern_map(p->mtp_symbols, cores[k]->symbol, NULL) * p->n_mtp_depths;
        must(sum == p->n_layers + p->n_mtp_layers * p->n_mtp_depths);
        st = pattern_check_keys(p, &e);
        must(st == ST_OK || (st == ST_USAGE && p->grouped));
    } else {
        refused_with_reason(st, p->error, &e);
    }
    free(text);
    free(p);
    return 0;
}
