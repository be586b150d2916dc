/* Ranks and the communication between them.
 *
 * A *world* is all ranks of a run, reached by one transport: self (one rank), threads (ranks of one process), mpi,
 * nccl (GPUs; a host transport beside it for start and agreement), ipc (processes of one host that read each other's
 * memory, so that they may share a GPU), loop (one rank whose messages to itself cost what a link would). A *comm* is a
 * group of them. Collectives take tensors: counts and types follow from them, and differing ones are an error. Every
 * rank of a group calls the same collectives in the same order; the board (below) shows which rank did not.
 *
 * Sums are taken in rank order on every transport, so that bits depend on the mesh alone: a reduction is an exchange of
 * pieces followed by our own sum. A transport therefore only moves bytes: exchange, send, receive.
 *
 * Calls run on a lane: on a host device they return when done; on a GPU they are ordered with the lane's other work. */
#ifndef BRAID_COMM_H
#define BRAID_COMM_H

#include "dev/dev.h"
#include "kind/transports.h"

#define COMM_ID(X, id, name) COMM_##id,
enum comm_kind { TRANSPORTS(COMM_ID, ) COMM_KINDS };
const char *comm_kind_name(enum comm_kind k);
/* Where the ranks of a world of this kind are. */
enum comm_ranks { RANKS_ONE, RANKS_THREADS, RANKS_PROCESSES };
enum comm_ranks comm_kind_ranks(enum comm_kind k);

struct world;
struct comm {
    struct world *world;
    const char *name; /* "dp", for messages */
    int rank, size;   /* of this rank in the group */
    const int *ranks; /* world rank of each member, rising */
    int id;           /* the same on every member; numbers collectives on the board */
    void *native;     /* the transport's own */
};

/* ---- collectives ----------------------------------------------------------------------------- */

/* what: a name for messages, "3.moe.dispatch", written to the board before the call can block. All
 * tensors are dense. */

/* t becomes the sum (F64, F32, BF16 summed in fp32, I32, I64) over ranks, in rank order. work: size * bytes of t; it
 * may be absent in a group of one. */
int comm_all_reduce(struct comm *c, struct lane *l, const char *what, struct tensor *t, struct tensor *work);
/* x [n] is cut into pieces of `piece` elements, rank r owning [r * piece, (r + 1) * piece) up to n. Of every piece,
 * elements [from, from + n): the sum over ranks of the own ones goes to the same elements of out [own piece], which may
 * be that piece of x; add: on top of what out holds. bf16: values travel rounded to bf16 and are summed in the type of
 * x. work: comm_sum_room() bytes, other ones for each call of a group. */
struct piece_slice {
    int64_t piece, from, n;
    bool bf16;
};
int comm_sum_pieces(struct comm *c, struct lane *l, const char *what, const struct tensor *x, struct piece_slice s,
                    struct tensor *out, bool add, struct tensor *work);
int64_t comm_sum_room(int ranks, int64_t n, enum dtype type, bool bf16);
/* Every rank's `own` piece goes to its place in x on all ranks; own may already be that place. */
int comm_gather_pieces(struct comm *c, struct lane *l, const char *what, const struct tensor *own, struct tensor *x,
                       int64_t piece);
/* The same pieces: every rank's own piece of x goes to all. */
int comm_all_gather(struct comm *c, struct lane *l, const char *what, struct tensor *x, int64_t piece);
/* Ranks of a group in their order, as they divide a sequence: a rank needs what those before it have. */
/* x: the pieces (own, of equal sizes) of ranks 0 .. rank in order, or with later those of ranks rank .. size - 1. */
int comm_gather_line(struct comm *c, struct lane *l, const char *what, const struct tensor *own, struct tensor *x,
                     bool later);
/* The reverse of a gather: piece r of x (of rank + 1) goes to rank r, and out [piece] becomes the sum of the pieces
 * that this rank and those after it have for it, in rank order. work: size - rank pieces. */
int comm_sum_line(struct comm *c, struct lane *l, const char *what, const struct tensor *x, struct tensor *out,
                  struct tensor *work);
/* From every rank to the next, or with back to the one before: recv becomes what the neighbour sends. Where there is
 * none, send or recv is ignored and may be absent. A rank may have nothing to send: its send is absent (data NULL), and
 * so is recv of the neighbour. */
int comm_shift(struct comm *c, struct lane *l, const char *what, const struct tensor *send, struct tensor *recv,
               bool back);
/* t of rank `from` becomes that of rank `to`; the others take part in the call, and their t may be absent. */
int comm_hop(struct comm *c, struct lane *l, const char *what, const struct tensor *t, int from, int to);
/* send, recv [size, cap, ...]: buffer r goes to rank r, buffer r of recv comes from it. Of a buffer only the first
 * rows[r] of its cap rows count: send_rows, recv_rows I32 [size], in device memory, or absent (data NULL: all). A
 * transport may move more; what lies behind them in recv is undefined. */
int comm_all_to_all(struct comm *c, struct lane *l, const char *what, const struct tensor *send, struct tensor *recv,
                    const struct tensor *send_rows, const struct tensor *recv_rows);
/* Several reductions or gathers between begin and end are one message per peer where the transport can do that. */
int comm_group_begin(struct comm *c, struct lane *l, const char *what);
int comm_group_end(struct comm *c, struct lane *l);

/* Between two ranks: a send never waits for its receiver (the bytes are kept until they are received); messages between
 * two ranks with one tag arrive in order. A rank may send to itself. */
int comm_send(struct comm *c, struct lane *l, const char *what, const struct tensor *t, int to, int tag);
int comm_recv(struct comm *c, struct lane *l, const char *what, struct tensor *t, int from, int tag);

/* Host memory, whatever the device: start-up, agreement, logs, checkpoints. */
/* all: size * bytes, on every rank */
int comm_host_gather(struct comm *c, const char *what, const void *mine, int64_t bytes, void *all, struct err *e);
int comm_host_broadcast(struct comm *c, const char *what, void *data, int64_t bytes, int root, struct err *e);
int comm_host_send(struct comm *c, const char *what, const void *data, int64_t bytes, int to, struct err *e);
int comm_host_recv(struct comm *c, const char *what, void *data, int64_t bytes, int from, struct err *e);
/* The worst status of all ranks; a rank without an error gets the message and the number of the first rank that has
 * one. */
int comm_agree(struct comm *c, const char *what, int status, struct err *e);
int comm_barrier(struct comm *c, const char *what, struct err *e);

/* Collectives so far, by kind of call, for tests and the report. */
struct comm_stats {
    int64_t calls, messages, bytes;
};
struct comm_stats comm_stats(const struct comm *c);

/* ---- the board: where every rank is ---------------------------------------------------------- */

/* Every rank writes its place before it blocks: step, what, collective number, since when. With threads in memory, else
 * in a file of the run folder (so that a stopped rank can be read by the others). A call that waits longer than the
 * timeout ends with an error that names the ranks that did not arrive: rank, step, what, since when. */
void world_at_step(struct world *w, int64_t step);

/* ---- worlds ---------------------------------------------------------------------------------- */

struct world_opts {
    enum comm_kind kind;
    int ranks;           /* threads: how many; otherwise 0 */
    double timeout;      /* seconds; 0: wait forever */
    int port;            /* tcp: where rank 0 listens; 0: MASTER_PORT, or a port derived from it */
    const char *secret;  /* tcp: env:NAME or a file; NULL or "": none */
    int64_t queue_bytes; /* tcp: most bytes that a peer may send before they are received; 0: half of the memory */
    const char *board;   /* file of the board; NULL or "": memory (threads) or none */
    double loop_rate;    /* loop: bytes per second, and seconds per message */
    double loop_latency;
    int loop_ranks;  /* loop: the number of ranks that one rank's exchanges cost as much as */
    struct dev *dev; /* nccl, ipc, loop: the GPU; may be set later by world_device */
    /* nccl: becomes ipc where ranks share a GPU, which NCCL refuses; decided when the device is open */
    bool choose_gpus;
    /* of a process rank that failed earlier: it joins only to report that, so that rank 0 prints the error */
    int status;
    const struct err *why;
};
/* Rank, size and local rank from the variables of a launcher (mpirun, srun, torchrun); kind COMM_SELF without one. A
 * contradiction is an error here only where no rank can be reached; otherwise world_open reports it. */
struct launch {
    enum comm_kind kind; /* of host messages: COMM_MPI, COMM_TCP; COMM_SELF for one rank */
    int rank, size, local_rank, local_size;
    const char *by; /* "mpirun" */
};
int launch_detect(struct launch *l, struct err *e);

/* self, mpi, tcp, nccl, loop. Where rank 0 has printed the error, e of the other process ranks stays clear. */
int world_open(struct world **out, const struct world_opts *o, struct err *e);
int world_device(struct world *w, struct dev *dev, struct err *e); /* after the device is open */
void world_close(struct world *w);
/* Waits for the device as dev sync does, but with the timeout, and names the rank that causes the wait. */
int world_sync(struct world *w, const char *what, struct err *e);
/* Called by every rank before device memory that collectives have used is freed or reallocated: no rank keeps it
 * mapped. */
int world_forget(struct world *w, struct err *e);
/* A sentence that says why this transport was chosen; "": it was requested, or there is no other. */
const char *world_note(const struct world *w);
/* loop: another link from the next exchange on that is not captured. */
void world_loop(struct world *w, double rate, double latency);
/* May a plan with collectives be captured and replayed (GPU)? Not with thread ranks and ipc, which meet on the host;
 * with nccl only if the plan sends nothing from stage to stage. */
bool world_captures(const struct world *w, bool sends);
int world_rank(const struct world *w);
int world_size(const struct world *w);
enum comm_kind world_kind(const struct world *w);
/* The end of a process rank, before world_close. An error is printed here and e cleared: once, by rank 0, where all
 * ranks have it (comm_agree, world_same, a signal), else by the rank that has it; the others get time to print theirs
 * before the launcher ends them. */
int world_finish(struct world *w, int status, struct err *e);
/* True if all ranks have the error that this one has. */
bool world_error_agreed(const struct world *w);
struct comm *world_comm(struct world *w); /* all ranks */
/* Collective over the world: every rank names the group it is in (ranks rising, itself among them); disjoint groups at
 * once. A rank in no group passes n = 0 and gets NULL. */
int comm_open(struct world *w, const char *name, const int *ranks, int n, struct comm **out, struct err *e);
void comm_close(struct comm *c);
/* Announces that neighbours of this group (last and first too) will use comm_send and comm_recv on a lane. mesh_open
 * does it for pp_comm; nccl opens its connections here, or when the device is opened. */
int comm_ring(struct comm *c, struct err *e);

/* Run fn on every rank of a thread world, one thread each; the first rank's error comes back, all ranks have ended.
 * When one fails, the others' waits end with an error that names it. */
int world_threads(const struct world_opts *o, int (*fn)(struct world *w, void *ctx, struct err *e), void *ctx,
                  struct err *e);

/* Every rank gives the same text (config, binary) or the difference is reported with the rank. */
int world_same(struct world *w, const char *what, const char *text, struct err *e);

/* ---- mesh ------------------------------------------------------------------------------------ */

/* Ranks as a grid, tensor parallel fastest: rank = stage_rank + stage * pp_rank, where the ranks of a stage are
 * stage_rank = tp_rank + tp * (cp_rank + cp * dp_rank). Experts divide the same ranks in another way: stage_rank =
 * etp_rank + etp * (ep_rank + ep * edp_rank); experts [ep_rank * E / ep, ...) live on ep_rank. Virtual stage v of stage
 * p is chunk v * pp + p of the model.
 *
 * Ranks that differ in tp_rank hold slices of the same weights and divide the rows of the residual stream; those that
 * differ in cp_rank divide every sequence; those that differ in dp_rank have other samples. */
struct mesh {
    int world, rank;
    int tp, cp, dp, pp, vpp;       /* world = tp * cp * dp * pp */
    int stage;                     /* ranks of a pipeline stage: tp * cp * dp = etp * ep * edp */
    int etp, ep, edp;              /* of experts: ranks that divide each of them, all of them, and copies */
    int first_layers, last_layers; /* of the first and the last stage; 0: an even share */
    int zero;                      /* parallel.zero: how much of what ranks hold copies of is sharded over them */
    int tp_rank, cp_rank, dp_rank, pp_rank, stage_rank, etp_rank, ep_rank, edp_rank;
    struct comm *all, *ep_comm, *edp_comm, *pp_comm;
    struct comm *dp_comm;                      /* dp x cp: the ranks with the same slices of dense weights */
    struct comm *stage_comm;                   /* tp x cp x dp; dp_comm where tp is 1 */
    struct comm *tp_comm, *cp_comm, *etp_comm; /* NULL where the size is 1 */
    int kv_ranks;                              /* tensor-parallel ranks that share one group of keys and values */
    struct comm *kv_comm;                      /* these; NULL for one */
    struct comm *batch_comm; /* tp x cp: the ranks that divide the tokens of one microbatch; NULL for one */
    struct comm *ends_comm;  /* first and last stage of this column, where embeddings are shared; NULL elsewhere */
    int64_t ep_rows;         /* rows a buffer between two ranks of ep_comm holds; 0: by parallel.ep_capacity */
    int64_t ep_expert_rows;  /* rows there is room for at the experts of a rank; 0: the same */
    bool ep_nodes;           /* experts exchange rows through ep_comm even if it has one member (loop) */
    bool dp_nodes;           /* gradients and weights are exchanged even where no other rank has a copy (loop) */
    bool tp_nodes;           /* rows are gathered and scattered around layers that no other rank shares (loop) */
};
enum loop_axis { LOOP_EP, LOOP_DP, LOOP_TP };
struct mesh_sizes {
    int pp, vpp, ep;               /* 1 or more */
    int first_layers, last_layers; /* 0: an even share */
    int zero;                      /* 0 .. 3 */
    int tp, cp, etp, kv_ranks;     /* 0 counts as 1 */
    enum loop_axis loop;           /* which exchanges a loop simulates */
};
/* Pure: the place of a rank; refuses numbers that do not divide, naming the option. */
int mesh_place(struct mesh *m, const struct mesh_sizes *s, int world, int rank, struct err *e);
/* Places this rank and opens the groups. */
int mesh_open(struct mesh *m, const struct mesh_sizes *s, struct world *w, struct err *e);
void mesh_close(struct mesh *m);
/* "4 data-parallel, 2 pipeline stages, experts over 1", and other sizes above 1. */
const char *mesh_text(const struct mesh *m, char *out, size_t size);
/* One rank, no communication. */
struct mesh mesh_alone(void);

/* ---- copies of a parameter ------------------------------------------------------------------- */

/* The ranks that hold copies of a parameter and add up its gradients. Of a parameter that tensor parallelism divides
 * these are the ranks with the same slice. One that it does not divide is on all ranks of the stage, and each computes
 * the part of its gradient that belongs to its tokens or heads. With parallel.tp = 1 all dense ones are slices. */
enum copy_group { COPIES_SLICE, COPIES_STAGE, COPIES_EXPERT, COPY_GROUPS };
enum copy_group mesh_copy_group(const struct mesh *m, const struct param *p);
struct copies {
    int n, rank;       /* how many, and which this one is */
    int stride;        /* world ranks from one to the next */
    struct comm *comm; /* NULL on paper */
};
struct copies mesh_group(const struct mesh *m, enum copy_group group);
int mesh_copies(const struct mesh *m, const struct param *p);
int mesh_copy_rank(const struct mesh *m, const struct param *p);
struct comm *mesh_copy_comm(const struct mesh *m, const struct param *p);
/* Elements of a parameter, as this rank holds it, that this rank owns among those with copies: equal pieces, rounded up
 * so that pieces begin where vectors do, the last ones shorter or empty. Whole rows where codes travel
 * (param.code_shards). */
struct shard {
    int64_t first, n;
    int64_t piece; /* of the ranks before the last */
};
struct shard mesh_shard(const struct mesh *m, const struct param *p);
/* What a rank keeps of a parameter, and from which parallel.zero on only its shard. Where codes travel, nobody needs
 * all values: only those that this rank updates are kept, with or without its codes of the others. */
enum kept_form { KEPT_WEIGHT, KEPT_GRADIENT, KEPT_MASTER, KEPT_MOMENT, KEPT_CODES };
bool mesh_shards(const struct mesh *m, const struct param *p, enum kept_form form);
/* The part that is kept: the shard, or all of it. */
struct shard mesh_kept(const struct mesh *m, const struct param *p, enum kept_form form);

/* World rank of a place in this mesh. */
static inline int mesh_rank_at(const struct mesh *m, int pp_rank, int dp_rank, int cp_rank, int tp_rank)
{
    return tp_rank + m->tp * (cp_rank + m->cp * (dp_rank + m->dp * pp_rank));
}
static inline bool mesh_is_first(const struct mesh *m, int chunk) { return m->pp_rank == 0 && chunk == 0; }
static inline bool mesh_is_last(const struct mesh *m, int chunk)
{
    return m->pp_rank == m->pp - 1 && chunk == m->vpp - 1;
}

#endif
