/* The commands that torture and powercut run, and what they must leave. Private to tests/torture. */
#ifndef BRAID_TORTURE_SCENARIOS_H
#define BRAID_TORTURE_SCENARIOS_H

#include "base/base.h"

#include <sys/types.h>

enum { MOST_WORDS = 24, MOST_FILES = 5 };

/* %B in a word is the folder with inputs and reference results. A command runs in an empty folder. */
struct scenario {
    const char *name;
    const char *words[MOST_WORDS];
    const char *start;             /* folder below %B that is copied to run/ first; NULL: none */
    const char *files[MOST_FILES]; /* results; none: standard output is the result */
    bool small;                    /* every single allocation can be tried */
    bool again;                    /* may be run again when it is done */
    bool together;                 /* files replace others of the same names: all old, all new, or not all there */
};
extern const struct scenario scenarios[];
extern const int n_scenarios;

struct place {
    const char *braid, *base, *root; /* root: where tests/ and configs/ are */
};

/* Inputs and reference results in place->base; false: a message was printed. */
bool prepare_base(const struct place *p);
/* Runs the scenario in `dir` (made afresh unless keep), with these environment entries ("A=B", NULL ends), output to
 * dir/../out-<tag> and err-<tag>. Returns waitpid's status. A run of over a minute ends by SIGALRM. */
int run_scenario(const struct place *p, const struct scenario *s, const char *dir, const char *const *env, bool keep,
                 const char *tag);
/* Are the results those of the reference? why gets the first difference. */
bool same_results(const struct place *p, const struct scenario *s, const char *dir, const char *tag, char *why,
                  size_t size);
/* For a scenario whose files belong together: do those that are there? */
bool files_fit(const struct place *p, const struct scenario *s, const char *dir);
/* A temporary file or folder, or a lock, somewhere below dir; false: none. */
bool has_leftovers(const char *dir, char *found, size_t size);
void print_tail(const char *dir, const char *tag); /* the end of what it said on standard error */
bool said_something(const char *dir, const char *tag);
bool said(const char *dir, const char *tag, const char *text); /* on standard error */

#endif
