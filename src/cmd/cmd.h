/* The subcommands of `braid`: one small file each. A command gets argv from its own name on, prints its
 * errors itself and returns the exit code. */
#ifndef BRAID_CMD_H
#define BRAID_CMD_H

#include "train/train.h"

int cmd_train(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_report(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_gradcheck(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_op(int argc, char **argv);
int cmd_grads(int argc, char **argv);
int cmd_ckpt(int argc, char **argv);
int cmd_import(int argc, char **argv);
int cmd_export(int argc, char **argv);
/* The options of a Hugging Face folder's model, and its weights to start from. */
int cmd_init_from(struct config *c, const char *folder, bool say, struct err *e);
int ckpt_merge(int argc, char **argv, struct err *e);   /* words after `braid ckpt merge` */
int ckpt_convert(int argc, char **argv, struct err *e); /* words after `braid ckpt convert` */
int cmd_data(int argc, char **argv);
int cmd_help(int argc, char **argv);

/* ---- shared by commands ---------------------------------------------------------------------- */

/* Exit code of a status; prints the error. An interrupted run exits 130. */
int cmd_exit(int status, const struct err *e);
/* True when --help was among the words and printed: usage, then the options of the list (globs; NULL: the command takes
 * none).
 * --help=all, --help=SECTION and --help=OPTION print those in full. */
bool cmd_wants_help(int argc, char **argv, const char *usage, const char *options);
/* Help on a word: "all", a section, an option; an unknown word is reported on stderr. Returns the exit code. */
int cmd_explain(const char *word);
/* Defaults, file, overrides. Automatic values and rules are left to cmd_finish. */
int cmd_config(struct config *c, int argc, char **argv, struct config_args *args, struct err *e);
/* May a command write a new run folder here? Yes where nothing is, or only what an earlier one left that failed. */
int cmd_free_name(const char *path, bool *is_free, struct err *e);
/* An error when more than `most` words are left beside the options. */
int cmd_words(const struct config_args *args, int most, struct err *e);
/* The vocabulary from the tokenizer where it was left open; then automatic values and rules. */
int cmd_finish(struct config *c, struct err *e);
/* Parameters from run.load_weights, the model being as configured; rank 0 prints which missing or extra keys were
 * allowed. */
int cmd_take_weights(struct model *m, struct err *e);
/* For commands that take their weights from elsewhere: an error when run.load_weights is given. */
int cmd_refuse_weights(const struct config *c, const char *command, struct err *e);
/* A note on stderr for every option that was set and has no effect; nothing with run.quiet. */
void cmd_say_unused(const struct config *c);
/* The same for options of training on the command line of a command that does not train. */
void cmd_say_unread(const struct config *c, const char *command);
/* The checkpoint an eval or generate means: the positional word, run.load or run.dir; takes the model's
 * options from it. */
int cmd_open_checkpoint(struct config *c, const struct config_args *args, struct ckpt **out, struct err *e);

/* The longest sequence that a model is asked about: --length, or else train.seq. */
int cmd_length(const struct config *c, const char *given, int64_t *out, struct err *e);

/* ---- the run folder (run_folder.c) ----------------------------------------------------------- */

/* A folder that holds other things than a run is refused as run.dir, and so is one inside a folder of training data:
 * what a run writes would become training data. */
int cmd_check_run_folder(const struct config *c, struct err *e);
int cmd_check_run_in_data(const struct config *c, struct err *e);
/* Where run.dir has no checkpoint to continue and no config file was named: the options in its config.ini. */
int cmd_options_of_run(struct config *c, const struct config_args *args, bool is_rank0, struct err *e);

/* A file of random tokens in a temporary place, for steps that are only timed: the data path is part of them. The
 * caller removes it. */
int cmd_random_data(struct config *c, char *path, size_t size, struct err *e);

/* ---- the schedule of all ranks (plan_timeline.c) --------------------------------------------- */

/* Words of `braid plan` that ask for it, as they were given; NULL: not. */
struct timeline_words {
    const char *file, *predict, *measure, *flops, *attention, *bandwidth, *link_gbps, *link_us, *node_gbps, *node_gpus,
        *beside, *memory, *host_gbps, *gpus, *tokens;
};
int plan_timeline(struct config *c, const struct timeline_words *w, struct err *e);
int plan_search(struct config *c, const struct timeline_words *w, struct err *e);

/* ---- plans that fit (plan_fit.c) ------------------------------------------------------------- */

/* plan.fit: chooses and sets what it chooses, or says why nothing fits. processes: of a launcher. out: the table; NULL:
 * none. */
int cmd_fit(struct config *c, int processes, struct buf *out, struct err *e);
/* What it chose when the run was started, from the configuration that a checkpoint holds: a config file may say
 * otherwise. kept: false where that run had another budget, or none. */
int cmd_fit_again(struct config *c, const char *saved, const char *label, bool *kept, struct err *e);
struct fullest_rank {
    int rank;
    int64_t device, host; /* bytes */
};
/* One line: does the plan fit into --memory (NULL: that of plan.fit, else 80 GB), and what would? Of several ranks the
 * fullest counts. */
int plan_verdict(const struct config *c, const char *memory, const struct trainer *t, const struct fullest_rank *most,
                 struct buf *out, struct err *e);

/* bench_offload.c: what braid bench train says of state in host memory; nothing where there is none. Every rank calls
 * it, after the steps that are timed. step: seconds of one. */
int bench_offload(struct trainer *t, double step, struct err *e);
/* Sorts, too: the least is the first then. */
double bench_median(double *seconds, int64_t n);
/* bench_link.c: steps in turn over the link that parallel.comm=loop plays and over one without limits, `steps` of each,
 * and what they say of exchanges: exposed, whole, hidden. */
int bench_link(struct trainer *t, int steps, struct err *e);

/* bench_generate.c: words after `braid bench generate`. */
int bench_generate(int argc, char **argv, struct err *e);

/* ---- ranks: a launcher's processes, or threads of this one ----------------------------------- */

struct cmd_ranks {
    struct launch launch;
    enum comm_kind kind;
    int ranks;
};
/* What launcher and config say; after cmd_config, before cmd_finish (the global batch depends on it). */
int cmd_count_ranks(struct config *c, struct cmd_ranks *r, struct err *e);
/* Does this process log and print for the run? With threads all of them are in one process. */
static inline bool cmd_is_rank0(const struct cmd_ranks *r) { return r->kind == COMM_THREADS || r->launch.rank == 0; }
/* After an error before the ranks met (options, files): they meet to end together, and rank 0 prints it. */
int cmd_tell_ranks(const struct config *c, int status, struct err *e);
/* Until its end a stop signal that is blocked (SIGINT, SIGTERM, SIGHUP) ends the process at once, with a message. Begin
 * may give NULL, which the others take; end may be called by any thread, any number of times. */
struct startup_watch;
struct startup_watch *startup_watch_begin(void);
void startup_watch_end(struct startup_watch *w);
void startup_watch_close(struct startup_watch *w);
/* fn for every rank that lives in this process, each with its place. The first error comes back, or was printed already
 * (world_finish). */
int cmd_run_ranks(const struct config *c, const struct cmd_ranks *r,
                  int (*fn)(const struct rank_place *place, void *ctx, struct err *e), void *ctx, struct err *e);

#endif
