/* Private to config/: the option row, and what its readers and writers share. */
#ifndef BRAID_CONFIG_INT_H
#define BRAID_CONFIG_INT_H

#include "config/config.h"
#include "kind/kind.h"

#include <string.h>

enum {
    CONFIG_MAX_FILE = 1 << 20,   /* bytes of an INI file */
    CONFIG_MAX_STRING = 1 << 16, /* bytes of a string value */
    CONFIG_MAX_ALIASES = 3,
    CONFIG_MAX_OPTIONS = 256,
};

enum option_type { OPT_BOOL, OPT_INT, OPT_REAL, OPT_STRING, OPT_ENUM };

enum option_flag {
    OPT_MODEL = 1,    /* defines the model: fixed once a checkpoint exists */
    OPT_RUN = 2,      /* may change from run to run */
    OPT_INHERIT = 4,  /* with OPT_RUN: taken from the checkpoint unless the user sets it */
    OPT_LOCAL = 8,    /* with OPT_RUN: belongs to one invocation, never taken from a checkpoint */
    OPT_ABOVE = 16,   /* min itself is excluded */
    OPT_BELOW = 32,   /* max itself is excluded */
    OPT_WORDS = 64,   /* its alias takes all words up to the next option */
    OPT_ALL = 128,    /* 0 is written "all" */
    OPT_SWITCH = 256, /* on and off may stand for 1 and 0 */
};

/* "--name VALUE"; with value set it is a flag without an argument that means that value. */
struct option_alias {
    const char *name, *value;
};

struct option {
    const char *name; /* "model.hidden": also the field's path in struct config */
    enum option_type type;
    size_t offset;
    const char *def;
    double min, max;           /* int and real */
    const char *const *values; /* enum: NULL-terminated */
    unsigned flags;
    const char *automatic; /* what 0 stands for, or NULL when 0 is an ordinary value */
    struct option_alias alias[CONFIG_MAX_ALIASES];
    const char *help;
};

struct section {
    const char *name, *help;
};

extern const struct option config_options[];
extern const int config_n_options;
extern const struct section config_sections[];
extern const int config_n_sections;

const struct option *option_find(const char *name);
int option_index(const struct option *o);
/* Length of the section part: option names start with "section.". */
size_t option_section_len(const struct option *o);
static inline const char *option_key(const struct option *o) { return strrchr(o->name, '.') + 1; }

/* Parse, check bounds, store, remember the origin. Errors name the origin. */
int option_set(struct config *c, const struct option *o, const char *text, struct config_origin origin, struct err *e);
/* The option is one of several words, and text is one of them. */
bool option_has_choice(const struct option *o, const char *text);
/* The same into any struct, which o->offset is of, without an origin. Strings are copied into c. */
int option_store(struct config *c, void *base, const struct option *o, const char *text, struct config_origin origin,
                 struct err *e);
/* The value as text, unquoted; exact: it parses back to the same value. */
void option_text(const struct config *c, const struct option *o, struct buf *out);
void option_text_of(const void *base, const struct option *o, struct buf *out);
bool option_equal(const struct config *a, const struct config *b, const struct option *o);
bool option_is_automatic(const struct config *c, const struct option *o); /* holds 0 = automatic */
void option_range_text(const struct option *o, struct buf *out);          /* "1 to 65536", "a | b | c" */
const char *option_type_name(const struct option *o);
void real_text(double v, struct buf *out); /* the shortest text that parses back exactly */

/* Automatic values from the others. */
void derive_values(struct config *c);
/* An error if a layer of the pattern cannot do what an option says (uses.c). */
int config_refused(const struct config *c, struct err *e);
/* Repeats in model.pattern and model.mtp_pattern are written out. Doing it again changes nothing. */
int expand_patterns(struct config *c, struct err *e);
/* model.mtp_pattern and mtp_layers become part of model.pattern. Doing it again changes nothing. */
int derive_depths(struct config *c, struct err *e);

/* "demo.ini:3"; "" for the command line and defaults. */
const char *origin_text(struct config_origin o, char *out, size_t size);

/* The hint for a name that is no option ("train.learning_rate", "num-heads"); for what is known and not built, the
 * message too. dashes: "--" on the command line, "" elsewhere, NULL for a bare key of an INI section. more: names that
 * are valid beside options. Returns ST_USAGE. */
int suggest_option(const char *name, const char *dashes, const char *const *more, int n_more, struct err *e);

/* ---- groups.c: [group.NAME] ------------------------------------------------------------------ */

#define GROUP_SECTION "group"
extern const struct option group_options[]; /* offsets in struct config_group */
extern const int config_n_group_options;
/* "group.NAME.key" or, with key NULL, "group.NAME": is it one? */
bool group_named(const char *text);
/* The row of a key, or an error that names those there are. */
int group_key(const char *key, const struct option **out, struct err *e);
/* "group.NAME.key" = text; the group is made when it is named first. */
int group_set(struct config *c, const char *name, const char *text, struct config_origin origin, struct err *e);
int groups_check(const struct config *c, struct err *e);
void groups_write(const struct config *c, struct buf *out);
/* A resumed run: the groups of the checkpoint, unless the user named some; those must have the same members. */
int groups_load_saved(struct config *c, const struct config *saved, const char *label, struct buf *changes,
                      struct err *e);
/* A string as an INI value: quoted where it must be (write.c). */
void write_string(struct buf *out, const char *text);

/* ---- megatron.c: flags of other names -------------------------------------------------------- */

enum flag_how {
    FLAG_TAKEN,    /* braid does so anyway */
    FLAG_NOTED,    /* has no effect, which is noted */
    FLAG_REFUSED,  /* text: why */
    FLAG_HOLDS,    /* taken if holds() of what all other options say, else refused */
    FLAG_SETS,     /* option = to */
    FLAG_SAMPLES,  /* option = value / train.global_batch */
    FLAG_FRACTION, /* option = value * steps */
    FLAG_MINUTES,  /* option = value * 60 */
    FLAG_LAYERS,   /* option = value in layers of the pattern */
    FLAG_MOVES,    /* --moe-aux-loss-coeff is that of another loss, or of none */
};
/* One value of a flag; rows of a flag follow each other, the first that matches counts. */
struct flag {
    const char *name;  /* a * at its end: any name that begins so */
    const char *value; /* NULL: a flag without one, "*": any, "**": any number of words */
    const char *text, *option, *to;
    enum flag_how how;
    bool (*holds)(const struct config *c);
};
extern const struct flag config_flags[];
extern const int config_n_flags;
struct flag_use {
    const struct flag *flag;
    const char *value;
};
const struct flag *flag_find(const char *name);                           /* the first row, or NULL */
const struct flag *flag_row(const struct flag *first, const char *value); /* the row of a value, or NULL */
bool flag_takes_words(const struct flag *first);
int flag_refuse(const struct flag *f, const char *name, const char *value, struct err *e);
/* What depends on other options, once all are read. */
int flags_resolve(struct config *c, const struct flag_use *uses, int n, struct err *e);

/* "for example --train.warmup=5": one option of the rule, with a value that satisfies every rule. False: none was
 * found. */
bool propose_value(const struct config *c, const struct rule *r, struct buf *out);
/* Every rule in the order they are checked: those of no layer kind, then those of each kind. NULL:
 * there are no more. */
const struct rule *config_rule(int i);

#endif
