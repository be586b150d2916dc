/* What the files of comm/ share: the transport's table, the world behind the handle, the board, messages that wait. */
#ifndef BRAID_COMM_INT_H
#define BRAID_COMM_INT_H

#include "comm/comm.h"

enum comm_op { OP_ALL_REDUCE, OP_REDUCE_SCATTER, OP_ALL_GATHER, OP_ALL_TO_ALL, OP_GROUP, OP_HOST };

/* One message each way with one member. The k-th part a rank has for a peer meets the k-th part that peer has for it.
 * NULL: no message that way. */
struct part {
    int peer; /* rank in the group */
    const void *send;
    int64_t send_bytes;
    void *recv;
    int64_t recv_bytes;
};
struct exchange {
    enum comm_op op;
    const char *what;
    const struct part *part;
    int n;
};
/* A message between two ranks. On a lane tags are the caller's; on the host there is one queue per pair. */
struct message_to {
    int peer, tag;
    int64_t bytes;
};

/* A transport moves bytes; every function is called by all ranks concerned. l NULL: host memory, errors to e. Functions
 * that wait do so with wait_* below, so that all end and report alike. */
struct transport {
    const char *name;
    bool plays_link;  /* messages to oneself are exchanged too, at a cost */
    bool alone_too;   /* a world of one goes through it as well, so that one GPU can test it */
    bool captures;    /* exchanges on a GPU's lane may be recorded and replayed */
    bool sends_apart; /* but sends and receives may not */
    int (*exchange)(struct comm *c, struct lane *l, const struct exchange *x, struct err *e);
    int (*send)(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e);
    int (*recv)(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e);
    /* These may be NULL. */
    int (*comm_open)(struct comm *c, struct err *e);
    void (*comm_close)(struct comm *c);
    int (*ring)(struct comm *c, struct err *e); /* neighbours of this group will send to each other */
    int (*device)(struct world *w, struct err *e);
    int (*sync)(struct world *w, const char *what, struct err *e);
    int (*forget)(struct world *w, struct err *e); /* device memory that was exchanged is about to be freed */
    void (*close)(struct world *w);
};
extern const struct transport transport_self, transport_loop, transport_threads;

/* ---- messages: bytes that were sent and not yet received ------------------------------------- */

struct message {
    struct message *next;
    int comm, from, to, tag; /* ranks of the world */
    bool host, gpu;          /* host: sent by a host call; gpu: the bytes lie on the GPU */
    int64_t bytes;
    void *data;
    void *busy; /* an event: until then a spare message's bytes are still read (nccl) */
};
/* Buffers are kept and used again, so that a captured run finds the ones its first run allocated. */
struct inbox {
    struct message *first, **last, *spare;
};
void inbox_init(struct inbox *m);
void inbox_release(struct inbox *m);
int inbox_blank(struct inbox *m, bool gpu, int64_t bytes, struct message **out, struct err *e);
void inbox_post(struct inbox *m, struct message *l);
/* The oldest with these addresses, taken out; NULL if there is none. */
struct message *inbox_take(struct inbox *m, const struct message *like);
void inbox_spare(struct inbox *m, struct message *l);
/* Messages of a rank to itself, without waiting: the send comes first or there is an error. */
int inbox_send_self(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e);
int inbox_recv_self(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e);

/* ---- the board ------------------------------------------------------------------------------- */

/* FOLLOWED: ended because another failed. */
enum rank_state { RANK_NEW, RANK_AT_WORK, RANK_WAITS, RANK_GAVE_UP, RANK_FAILED, RANK_FOLLOWED, RANK_ENDED };
static inline bool rank_stopped(int s) { return s == RANK_GAVE_UP || s == RANK_FAILED || s == RANK_FOLLOWED; }
struct board_entry {
    uint64_t run; /* entries of an earlier run in the same file do not count */
    int64_t step, number;
    double since, beat; /* wall clock: of the state, of the last sign of life */
    int32_t pid, state, waits_for;
    char host[36], group[16], what[64], why[160];
};
struct board {
    uint64_t run;
    int fd;                      /* -1: none */
    struct board_entry *entries; /* ranks of one process; NULL otherwise */
    void *lock;                  /* pthread_mutex_t of those */
    struct board_entry mine;
};
int board_open_file(struct world *w, const char *path, uint64_t run, struct err *e);
void board_close(struct world *w);
void board_write(struct world *w);
bool board_read(struct world *w, int rank, struct board_entry *out);
/* This rank enters and leaves something that can block. */
void board_enter(struct comm *c, int64_t number, const char *what);
void board_leave(struct comm *c);
void board_state(struct world *w, enum rank_state s, const char *why);

/* Waiting: `while (!done) { nap; if (wait_due(&t)) { collect who is missing; TRY(wait_look(...)); } }` */
struct wait {
    double start, next, stop_at; /* stop_at: when a pending stop signal ends the wait; 0: none was seen */
};
struct wait wait_begin(void);
bool wait_due(const struct wait *t);
/* ranks: of the world. An error when the time is up, or when a rank failed, gave up, or ended without arriving. */
int wait_look(struct comm *c, struct wait *t, const int *missing, int n, struct err *e);

/* ---- behind the handles ---------------------------------------------------------------------- */

struct rendezvous; /* threads.c */
struct mpi;        /* mpi.c */
struct tcp;        /* tcp.c */
struct nccl;       /* nccl.c */
struct ipc;        /* ipc.c */
struct world {
    enum comm_kind kind;
    int rank, size, local_rank;
    double timeout;
    const struct transport *on_lane, *on_host;
    struct dev *dev;
    struct board board;
    struct inbox inbox; /* messages to oneself */
    struct comm *all;
    int n_opened;      /* groups so far, the same on every rank */
    bool agreed_error; /* every rank has the error of this one */
    double loop_rate, loop_latency;
    int loop_ranks;
    struct rendezvous *rendezvous;
    struct mpi *mpi;
    struct tcp *tcp;
    struct nccl *nccl;
    struct ipc *ipc;
    bool choose_gpus; /* nccl, unless ranks share a GPU */
    char note[200];   /* why this transport, where it was not asked for */
};

/* What a group does after its bytes have arrived. */
struct pending {
    struct tensor out;  /* the sum goes here */
    const void *pieces; /* one after the other, n elements apart */
    int n_pieces;
    bool bf16, add; /* pieces are bf16, whatever out is; their sum is added to out */
};
struct comm_own {
    struct comm pub; /* first: casts */
    char name[16];
    int *ranks;
    int64_t number; /* of exchanges so far */
    struct comm_stats stats;
    bool grouping;
    const char *group_what;
    struct part *part;
    size_t n_part, cap_part;
    struct pending *pending;
    size_t n_pending, cap_pending;
};
static inline struct comm_own *own(struct comm *c) { return (struct comm_own *)c; }
/* One rank on its own moves nothing, unless its transport wants it. */
static inline bool comm_moves(const struct comm *c, const struct transport *t)
{
    return c->size > 1 || t->plays_link || (t->alone_too && c->world->size == 1);
}
static inline bool on_gpu(const struct lane *l) { return l != NULL && l->dev->kind == DEV_CUDA; }

int world_new(struct world **out, const struct world_opts *o, int rank, int size, struct err *e);
int comm_new(struct world *w, const char *name, const int *ranks, int n, int id, struct comm **out, struct err *e);
/* Bytes within one device: on the lane, or now. */
int move_bytes(struct lane *l, void *dst, const void *src, int64_t bytes, struct err *e);
/* Copies parts of a rank to itself, the k-th of those sent to the k-th of those received. */
int move_own_parts(struct comm *c, struct lane *l, const struct exchange *x, struct err *e);
/* out = pieces summed in order; pieces lie n elements apart. Host memory. */
void sum_pieces(const struct tensor *out, const void *pieces, int n_pieces, int threads);
/* The same of bf16 pieces, in the type of out; add: to what is there. */
void sum_bf16_pieces(const struct tensor *out, const void *pieces, int n_pieces, bool add);
void round_to_bf16(const struct tensor *to, const struct tensor *from);

int launch_read(struct launch *l, struct err *e);
/* The world of the launcher, whose transport carries host messages of those that move the memory of GPUs. */
int world_open_host(struct world **out, const struct world_opts *o, struct err *e);
/* It could not be opened: all ranks end. Returns status. */
int world_abandon(struct world **w, int status, struct err *e);
/* Do two ranks use the same GPU? pair: the first two that do. Every rank calls it, with its device open. */
int gpus_shared(struct world *w, int pair[2], bool *shared, struct err *e);
/* From here on memory is exchanged by ipc. */
int ipc_attach(struct world *w, struct err *e);
/* Process ranks that have just met: one number for the run, and the board. */
int world_board(struct world *w, const struct world_opts *o, struct err *e);
/* All start, or none. */
int world_start(struct world *w, const struct world_opts *o, int status, struct err *e);

/* How a world of one kind is opened: a line of kind/transports.h and this, in the transport's file. */
struct transport_kind {
    enum comm_ranks ranks;
    bool host_only; /* moves host memory, and no GPU's */
    /* NULL: threads are started by world_threads */
    int (*open)(struct world **out, const struct world_opts *o, struct err *e);
};
#define TRANSPORT_KIND(X, id, name) extern const struct transport_kind transport_kind_##name;
TRANSPORTS(TRANSPORT_KIND, )
#undef TRANSPORT_KIND

#endif
