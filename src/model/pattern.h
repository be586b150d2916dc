/* The layer pattern: a string that says which layers a model has and how they are cut.
 *
 * clang-format off
 *     pattern := main ( "/" depth )*          depths: multi-token prediction, all alike, no brackets
 *     main    := segment ( "|" segment )*     segments: pipeline chunks, may be empty
 *     segment := item*
 *     item    := SYMBOL | "[" SYMBOL+ "]"     one item is one unit of the schedule
 *     SYMBOL  := of a layer kind (kind/kind.h)  one symbol is one physical layer
 * clang-format on
 *
 * Repeats ([*-]x32, (M-)x3; config/repeat.c) are written out first: positions are those of the written-out text.
 *
 * Everything here is text and numbers: whether a kind can be built is asked by pattern_check_cores alone.
 * Layers, items and segments are counted from 0; Megatron's layer_number is the physical index
 * plus 1. */
#ifndef BRAID_PATTERN_H
#define BRAID_PATTERN_H

#include "base/base.h"

enum { PATTERN_MAX = 4096 };

enum pattern_error {
    PATTERN_OK,
    PATTERN_LENGTH,          /* more than PATTERN_MAX bytes */
    PATTERN_REPEAT,          /* a repeat or parenthesis that cannot be written out */
    PATTERN_SYMBOL,          /* a character that is no layer, or no layer here */
    PATTERN_GROUP_OPEN,      /* '[' without ']' in its segment */
    PATTERN_GROUP_CLOSE,     /* ']' without '[' */
    PATTERN_GROUP_EMPTY,     /* [] */
    PATTERN_GROUP_NEST,      /* a group inside a group */
    PATTERN_MOE_NOT_LAST,    /* E inside a group, not at its end */
    PATTERN_ATTN_MIX,        /* * beside D or + */
    PATTERN_MTP_DIFFER,      /* depths that are not alike */
    PATTERN_MTP_GROUP,       /* a bracket in a depth */
    PATTERN_PIPE_FIRST_LAST, /* '|' and layer counts for the first or last stage */
    PATTERN_VPP_NO_PIPE,     /* virtual stages without '|' */
    PATTERN_SEG_DIV,         /* segments do not divide among pipeline ranks */
    PATTERN_SEG_RANGE,       /* no such segment */
    PATTERN_AUTO_DIV,        /* layers do not divide among pipeline ranks */
    PATTERN_AUTO_MIDDLE,     /* nor do those between a given first and last stage */
    PATTERN_GROUP_SPLIT,     /* an even cut would go through a group */
    PATTERN_PLACE,           /* a rank that cannot be: a mistake of the caller */
    PATTERN_ERRORS,
};
const char *pattern_error_name(enum pattern_error code); /* "E_SYMBOL" */

struct pattern_item {
    uint16_t first, n; /* physical layers; n is 1 unless grouped */
    bool grouped;      /* written with brackets */
};
struct pattern_segment {
    uint16_t first_item, n_items;   /* first_item: the logical offset */
    uint16_t first_layer, n_layers; /* first_layer: the physical offset */
};

struct pattern {
    char symbols[PATTERN_MAX + 1]; /* physical layers of the main part in order, groups flattened */
    int n_layers;
    char mtp_symbols[PATTERN_MAX + 1]; /* physical layers of one MTP depth; "" without depths */
    int n_mtp_layers, n_mtp_depths;
    bool has_main; /* false: no pattern, or nothing in front of the first '/' */
    bool grouped;  /* the main part has brackets */
    int main_len;  /* the main part is the first main_len bytes of text */
    int mtp_at;    /* where the first depth starts in text */
    int n_items, n_segments;
    uint16_t item_of[PATTERN_MAX]; /* physical layer -> item */
    uint16_t at[PATTERN_MAX];      /* physical layer -> position in text */
    struct pattern_item items[PATTERN_MAX];
    struct pattern_segment segments[PATTERN_MAX + 1];
    char text[PATTERN_MAX + 1]; /* as given */
    enum pattern_error error;   /* why the last parse failed */
};

/* text NULL: no pattern, which is no error; nor is an empty one. Errors are ST_USAGE, with p->error
 * set and the position marked under the string. */
int pattern_parse(struct pattern *p, const char *text, struct err *e);
/* One segment alone: '|' and '/' are no symbols. */
int pattern_parse_segment(struct pattern *p, const char *text, struct err *e);
/* "model.pattern: WHAT at position N of 'TEXT'" and the hint that points there; returns ST_USAGE. */
int pattern_refuse(const char *text, size_t at, struct err *e, const char *fmt, ...) PRINTF_LIKE(4, 5);

/* ---- pipeline chunks ------------------------------------------------------------------------- */

enum { PATTERN_NOT_GIVEN = -1 };
struct pattern_place {
    int pp_rank, pp_size;
    int vp;                        /* virtual stage, or PATTERN_NOT_GIVEN */
    int first_layers, last_layers; /* physical layers of the first and last rank, or PATTERN_NOT_GIVEN */
};
struct pattern_chunk {
    struct pattern_segment part; /* its items and layers; first_* are the offsets even when it is empty */
    bool auto_split;             /* cut evenly for want of '|': deprecated upstream, worth a warning */
    enum pattern_error error;
};
/* What one (rank, virtual stage) runs: segment vp * pp_size + pp_rank, or without '|' an even
 * share. */
int pattern_choose(const struct pattern *p, const struct pattern_place *at, struct pattern_chunk *out, struct err *e);
/* Virtual stages per rank that the segments ask for; 0: none. */
int pattern_virtual_stages(const struct pattern *p, int pp_size, int *out, enum pattern_error *code, struct err *e);

/* ---- counts and maps ------------------------------------------------------------------------- */

/* Where a symbol stands in a string of symbols: layers[k] (may be NULL) is the index of the k-th;
 * returns how many. */
int pattern_map(const char *symbols, char symbol, int *layers);
/* One item as it is written, with its brackets. */
void pattern_add_item(const struct pattern *p, int item, struct buf *out);

/* ---- checkpoint keys ------------------------------------------------------------------------- */

/* Grouped models store Transformer keys: layers by item, the final norm by Transformer's name. */
/* The N of "decoder.layers.N.": the item of a grouped model, the layer itself of a flat one. */
int pattern_layer_key_index(const struct pattern *p, int layer);
const char *pattern_final_norm_key(const struct pattern *p); /* of its weight */
/* Two layers of a group must not store the same names: [MM*E], [D+E]. */
int pattern_check_keys(const struct pattern *p, struct err *e);

/* ---- what can be built ----------------------------------------------------------------------- */

/* At least one layer, and a core for every symbol; the first gap is reported with its position. */
int pattern_check_cores(const struct pattern *p, struct err *e);

#endif
