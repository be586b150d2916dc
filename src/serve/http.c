/* The server. libmicrohttpd's thread moves bytes; the thread that called serve_run owns the model and answers one
 * request after the other. A connection whose request waits for the model is suspended, so none of its limits run
 * meanwhile; the time a request may take is counted from its arrival.
 *
 *   request -> handle() -> suspended, in the queue -> work() -> answered, resumed -> handle() -> sent -> finished() */
#include "serve/serve.h"
#include "base/stop.h"

#include <errno.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { IDLE_SECONDS = 30, REPLY_BYTES = 512 << 20, GRACE_MS = 2000 };

enum job_state { JOB_NEW, JOB_RECEIVING, JOB_QUEUED, JOB_ANSWERED };

struct job {
    struct MHD_Connection *connection;
    enum job_state state;
    struct buf body, reply;
    double arrived;
    int http;
    bool chat;
    struct job *next;
};

struct server {
    struct scorer *s;
    const struct serve_opts *o;
    struct serve_address address;
    struct MHD_Daemon *daemon;
    pthread_mutex_t lock; /* of what follows */
    struct job *first, *last;
    int open;    /* requests between their first byte and their end */
    int waiting; /* completions in the queue or under way */
    bool stopping;
    /* only of the thread that works */
    int wake, signals;
    double deadline;
    struct buf page;
};

/* ---- answers --------------------------------------------------------------------------------- */

static enum MHD_Result send_bytes(struct MHD_Connection *c, int http, const char *type, const char *bytes, size_t n)
{
    /* The library does not write to it: the pointer is not const because other modes free it. */
    struct MHD_Response *r = MHD_create_response_from_buffer(n, (void *)(uintptr_t)bytes, MHD_RESPMEM_MUST_COPY);
    if (r == NULL)
        return MHD_NO;
    enum MHD_Result ok = MHD_add_response_header(r, "Content-Type", type);
    if (ok == MHD_YES)
        ok = MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (ok == MHD_YES)
        ok = MHD_add_response_header(r, "Cache-Control", "no-store");
    if (ok == MHD_YES && str_starts(type, "text/html"))
        ok = MHD_add_response_header(
            r, "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'none'");
    if (ok == MHD_YES && http == 401)
        ok = MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (ok == MHD_YES)
        ok = MHD_queue_response(c, (unsigned)http, r);
    MHD_destroy_response(r);
    return ok;
}

static enum MHD_Result send_buf(struct MHD_Connection *c, int http, const struct buf *b)
{
    return b->failed || b->text == NULL ? MHD_NO : send_bytes(c, http, "application/json", b->text, b->len);
}

static enum MHD_Result refuse(struct MHD_Connection *c, int http, const char *message)
{
    struct buf b;
    struct err e = {0};
    buf_init(&b, 0);
    err_set(&e, ST_INVALID, "%s", message);
    reply_error(&b, http, &e);
    enum MHD_Result ok = send_buf(c, http, &b);
    buf_release(&b);
    return ok;
}

/* ---- who may ask what ------------------------------------------------------------------------ */

/* Takes the same time wherever the texts differ. */
static bool same_secret(const char *given, const char *secret)
{
    size_t n = strlen(secret), n_given = strlen(given);
    unsigned char differ = n != n_given;
    for (size_t i = 0; i < n; i++)
        differ |= (unsigned char)(secret[i] ^ given[i < n_given ? i : 0]);
    return differ == 0;
}

static bool may_ask(const struct server *v, struct MHD_Connection *c)
{
    const char *given = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization");
    return v->o->token == NULL ||
           (given != NULL && str_starts(given, "Bearer ") && same_secret(given + strlen("Bearer "), v->o->token));
}

/* Without a token only pages of this server may use it, not any page that the same browser shows. */
static bool comes_from_here(const struct server *v, struct MHD_Connection *c)
{
    const char *host = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Host");
    const char *origin = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Origin");
    if (v->o->token != NULL)
        return true;
    if (host != NULL && !serve_host_is_local(host, v->o->host))
        return false;
    return origin == NULL ||
           (host != NULL && str_starts(origin, "http://") && strcmp(origin + strlen("http://"), host) == 0);
}

static enum MHD_Result send_health(struct server *v, struct MHD_Connection *c)
{
    char text[64];
    pthread_mutex_lock(&v->lock);
    int waiting = v->waiting;
    pthread_mutex_unlock(&v->lock);
    int n = snprintf(text, sizeof text, "{\"status\": \"ok\", \"waiting\": %d}\n", waiting);
    return send_bytes(c, 200, "application/json", text, (size_t)n);
}

/* The answers that need no model, and all refusals; *done: one was queued. */
static enum MHD_Result answer_at_once(struct server *v, struct MHD_Connection *c, const char *url, const char *method,
                                      bool *done)
{
    bool get = strcmp(method, "GET") == 0, post = strcmp(method, "POST") == 0,
         chat = strcmp(url, "/v1/chat/completions") == 0, completions = chat || strcmp(url, "/v1/completions") == 0;
    const char *length = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    int64_t n = 0;
    *done = true;
    if (!comes_from_here(v, c))
        return refuse(c, 403, "this server answers only pages of its own: the Host or Origin header names another");
    if (get && strcmp(url, "/") == 0)
        return send_bytes(c, 200, "text/html; charset=utf-8", v->page.text, v->page.len);
    if (get && strcmp(url, "/health") == 0)
        return send_health(v, c);
    if (!completions && strcmp(url, "/v1/models") != 0)
        return refuse(c, 404,
                      "there is nothing here: /v1/completions, /v1/chat/completions, /v1/models, /health and / exist");
    if (!may_ask(v, c))
        return refuse(c, 401, "this server asks for a token: send the header 'Authorization: Bearer TOKEN'");
    if (!completions && get) {
        struct buf b;
        buf_init(&b, 0);
        reply_models(&b, v->o->model, v->o->limits.length);
        enum MHD_Result ok = send_buf(c, 200, &b);
        buf_release(&b);
        return ok;
    }
    if (!completions || !post)
        return refuse(c, 405, completions ? "completions take POST" : "/v1/models takes GET");
    if (chat && !v->s->has_chat)
        return refuse(
            c, 400, "this model has no chat template: start the server with --data.chat=NAME, or ask /v1/completions");
    if (length != NULL && (!parse_i64(length, &n) || n > v->o->limits.body_bytes))
        return refuse(c, 413, "the request is too large for this server");
    *done = false;
    return MHD_YES;
}

/* ---- the library's thread -------------------------------------------------------------------- */

static struct job *job_open(struct server *v, struct MHD_Connection *c)
{
    struct job *j = calloc(1, sizeof *j);
    if (j == NULL)
        return NULL;
    j->connection = c;
    j->arrived = time_now();
    buf_init(&j->body, (size_t)v->o->limits.body_bytes + 1);
    buf_init(&j->reply, REPLY_BYTES);
    pthread_mutex_lock(&v->lock);
    v->open++;
    pthread_mutex_unlock(&v->lock);
    return j;
}

/* Into the queue; false when the server is stopping. */
static bool put(struct server *v, struct job *j)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&v->lock);
    bool taken = !v->stopping;
    if (taken) {
        j->state = JOB_QUEUED;
        MHD_suspend_connection(j->connection);
        *(v->first != NULL ? &v->last->next : &v->first) = j;
        v->last = j;
        v->waiting++;
    }
    pthread_mutex_unlock(&v->lock);
    if (taken && write(v->wake, &one, sizeof one) != (ssize_t)sizeof one)
        return true; /* the counter is full: the worker is being woken anyway */
    return taken;
}

static struct job *take(struct server *v)
{
    pthread_mutex_lock(&v->lock);
    struct job *j = v->first;
    if (j != NULL)
        v->first = j->next;
    pthread_mutex_unlock(&v->lock);
    return j;
}

static enum MHD_Result handle(void *cls, struct MHD_Connection *c, const char *url, const char *method,
                              const char *version, const char *upload, size_t *n_upload, void **state)
{
    struct server *v = cls;
    struct job *j = *state;
    (void)version;
    if (j == NULL) {
        if ((j = job_open(v, c)) == NULL)
            return MHD_NO;
        *state = j;
    }
    if (j->state == JOB_NEW) {
        bool done;
        j->state = JOB_RECEIVING;
        j->chat = strcmp(url, "/v1/chat/completions") == 0;
        enum MHD_Result ok = answer_at_once(v, c, url, method, &done);
        if (done)
            j->state = JOB_ANSWERED;
        return ok;
    }
    if (*n_upload > 0) {
        if (j->state == JOB_RECEIVING) /* a refused request's body is read and dropped */
            buf_add_n(&j->body, upload, *n_upload);
        *n_upload = 0;
        return j->body.failed || time_now() - j->arrived > v->o->limits.seconds ? MHD_NO : MHD_YES;
    }
    if (j->state == JOB_RECEIVING)
        return put(v, j) ? MHD_YES : refuse(c, 503, "the server is stopping");
    return j->http != 0 ? send_buf(c, j->http, &j->reply) : MHD_YES;
}

static void finished(void *cls, struct MHD_Connection *c, void **state, enum MHD_RequestTerminationCode why)
{
    struct server *v = cls;
    struct job *j = *state;
    (void)c;
    (void)why;
    if (j == NULL)
        return;
    buf_release(&j->body);
    buf_release(&j->reply);
    free(j);
    *state = NULL;
    pthread_mutex_lock(&v->lock);
    v->open--;
    pthread_mutex_unlock(&v->lock);
}

/* ---- the thread that has the model ----------------------------------------------------------- */

int serve_block_signals(struct err *e)
{
    sigset_t set;
    stop_signals(&set);
    int code = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (code != 0 || signal(SIGPIPE, SIG_IGN) == SIG_ERR)
        return err_set(e, ST_IO, "signals cannot be blocked: %s", strerror(code));
    return ST_OK;
}

static bool signal_came(const struct server *v)
{
    struct signalfd_siginfo info;
    return read(v->signals, &info, sizeof info) == (ssize_t)sizeof info;
}

static void set_stopping(struct server *v)
{
    pthread_mutex_lock(&v->lock);
    v->stopping = true;
    pthread_mutex_unlock(&v->lock);
}

/* Asked before every run of a plan. Only this thread sets stopping, so it may read it without the lock. */
static int may_go_on(void *ctx, struct err *e)
{
    struct server *v = ctx;
    if (signal_came(v))
        set_stopping(v);
    if (v->stopping)
        return err_set(e, ST_INTERRUPTED, "the server is stopping");
    if (time_now() > v->deadline)
        return err_set(e, ST_PEER, "the request took longer than the %g seconds it may take", v->o->limits.seconds);
    return ST_OK;
}

static int encode(void *ctx, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e)
{
    return scorer_encode(ctx, text, n, prefix, out, e);
}

static int encode_chat(void *ctx, const struct chat_list *l, struct token_ids *out, struct err *e)
{
    return scorer_encode_chat(ctx, l, out, e);
}

static int read_job(struct server *v, struct job *j, struct completion_request *r, struct err *e)
{
    const char *body = j->body.text != NULL ? j->body.text : "";
    int64_t vocab = v->s->cfg->model.vocab;
    if (j->chat)
        return request_read_chat(r, body, j->body.len, &v->o->limits, vocab, &v->s->chat, encode_chat, v->s, e);
    return request_read(r, body, j->body.len, &v->o->limits, vocab, encode, v->s, e);
}

static int http_of(int status)
{
    switch (status) {
    case ST_OK: return 200;
    case ST_INVALID:
    case ST_UNSUPPORTED: return 400;
    case ST_INTERRUPTED:
    case ST_PEER: return 503;
    default: return 500;
    }
}

static void work(struct server *v, struct job *j)
{
    struct completion_request r = {.n_prompts = 0};
    struct err e = {0};
    double began = time_now();
    v->deadline = j->arrived + v->o->limits.seconds;
    int st = may_go_on(v, &e);
    if (st == ST_OK)
        st = read_job(v, j, &r, &e);
    if (st == ST_OK)
        st = request_answer(v->s, &r, v->o->model, &j->reply, &e);
    j->http = http_of(st);
    if (st != ST_OK) {
        buf_release(&j->reply);
        buf_init(&j->reply, 0);
        reply_error(&j->reply, j->http, &e);
    }
    if (!v->o->quiet)
        fprintf(stderr, "%d: %d prompts, %lld tokens, %.2f s (waited %.2f s)%s%s\n", j->http, r.n_prompts,
                (long long)r.n_tokens, time_now() - began, began - j->arrived, st != ST_OK ? ": " : "",
                st != ST_OK ? e.msg : "");
    request_release(&r);
    j->state = JOB_ANSWERED;
    pthread_mutex_lock(&v->lock);
    v->waiting--;
    pthread_mutex_unlock(&v->lock);
    MHD_resume_connection(j->connection);
}

static int wait_for_work(struct server *v, struct err *e)
{
    struct pollfd fds[] = {{.fd = v->signals, .events = POLLIN}, {.fd = v->wake, .events = POLLIN}};
    uint64_t count;
    while (!v->stopping) {
        if (poll(fds, countof(fds), -1) < 0 && errno != EINTR)
            return err_errno(e, "waiting for requests failed");
        if ((fds[0].revents & POLLIN) != 0 && signal_came(v))
            set_stopping(v);
        if ((fds[1].revents & POLLIN) != 0 && read(v->wake, &count, sizeof count) < 0 && errno != EAGAIN)
            return err_errno(e, "waiting for requests failed");
        for (struct job *j; (j = take(v)) != NULL;)
            work(v, j);
    }
    return ST_OK;
}

/* Requests that wait get their refusal, and a moment to be sent it. */
static void drain(struct server *v)
{
    set_stopping(v);
    for (struct job *j; (j = take(v)) != NULL;)
        work(v, j);
    for (int ms = 0; ms < GRACE_MS; ms += 20) {
        pthread_mutex_lock(&v->lock);
        bool idle = v->open == 0;
        pthread_mutex_unlock(&v->lock);
        if (idle)
            return;
        poll(NULL, 0, 20);
    }
}

/* ---- start and stop -------------------------------------------------------------------------- */

static void quiet_log(void *cls, const char *fmt, va_list ap)
{
    (void)cls;
    (void)fmt;
    (void)ap;
}

static int start(struct server *v, struct err *e)
{
    sigset_t set;
    stop_signals(&set);
    v->signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    v->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (v->signals < 0 || v->wake < 0)
        return err_errno(e, "cannot make an event file");
    for (int i = 0; serve_page[i] != NULL; i++)
        buf_add(&v->page, serve_page[i]);
    TRY(buf_check(&v->page, e));
    unsigned flags = MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    if (v->address.family == AF_INET6)
        flags |= MHD_USE_IPv6;
    errno = 0;
    v->daemon = MHD_start_daemon(
        flags, (uint16_t)v->o->port, NULL, NULL, handle, v, MHD_OPTION_EXTERNAL_LOGGER, quiet_log, NULL,
        MHD_OPTION_SOCK_ADDR, (const struct sockaddr *)v->address.bytes, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)v->o->limits.connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS,
        MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u, MHD_OPTION_NOTIFY_COMPLETED, finished, v, MHD_OPTION_END);
    if (v->daemon != NULL)
        return ST_OK;
    err_errno(e, "cannot listen on %s, port %d", v->o->host, v->o->port);
    return err_hint(e, "another program may use the port; --port=0 takes a free one");
}

static void announce(const struct server *v)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(v->daemon, MHD_DAEMON_INFO_BIND_PORT);
    int port = info != NULL && info->port != 0 ? info->port : v->o->port;
    bool v6 = strchr(v->o->host, ':') != NULL;
    printf("serving %s: http://%s%s%s:%d (up to %lld tokens%s)\n", v->o->model, v6 ? "[" : "", v->o->host,
           v6 ? "]" : "", port, (long long)v->o->limits.length, v->o->token != NULL ? "; with a token" : "");
    fflush(stdout);
}

int serve_run(struct scorer *s, const struct serve_opts *o, struct err *e)
{
    struct server v = {.s = s, .o = o, .signals = -1, .wake = -1};
    TRY(serve_address(&v.address, o->host, o->port, o->token != NULL, e));
    if (pthread_mutex_init(&v.lock, NULL) != 0)
        return err_set(e, ST_NOMEM, "out of memory");
    buf_init(&v.page, 0);
    s->g.check = may_go_on;
    s->g.check_ctx = &v;
    int st = start(&v, e);
    if (st == ST_OK) {
        announce(&v);
        st = wait_for_work(&v, e);
        drain(&v);
        MHD_stop_daemon(v.daemon);
    }
    s->g.check = NULL;
    if (v.signals >= 0)
        close(v.signals);
    if (v.wake >= 0)
        close(v.wake);
    buf_release(&v.page);
    pthread_mutex_destroy(&v.lock);
    return st;
}
