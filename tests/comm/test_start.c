/* Process ranks that meet over TCP: ports that are taken, strangers that connect, secrets,
 * addresses, and peers that send too much. Ranks are children of the test; each opens a world,
 * agrees with the others and ends. */
#include "support.h"

#include "comm/comm.h"
#include "comm/tcp_int.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { RANKS = 4 };

/* ---- ranks ----------------------------------------------------------------------------------- */

struct job {
    int ranks, port; /* MASTER_PORT */
    struct world_opts o;
    const char *secret[RANKS]; /* of each rank, where they differ */
    int (*body)(struct world *w, struct err *e);
    int said[RANKS]; /* read ends of each rank's errors */
    pid_t pid[RANKS];
};

static int sum_of_ranks(struct world *w, struct err *e)
{
    int32_t mine = world_rank(w) + 1, all[RANKS] = {0}, sum = 0;
    TRY(comm_host_gather(world_comm(w), "ranks", &mine, sizeof mine, all, e));
    for (int r = 0; r < world_size(w); r++)
        sum += all[r];
    return sum == world_size(w) * (world_size(w) + 1) / 2 ? ST_OK
                                                          : err_set(e, ST_INTERNAL, "the sum of ranks is %d", sum);
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void rank_main(const struct job *j, int rank, int out)
{
    struct err e = {0};
    struct world *w = NULL;
    struct world_opts o = j->o;
    dup2(out, STDERR_FILENO);
    setenv("MASTER_ADDR", "127.0.0.1", 0);
    set_number("MASTER_PORT", j->port);
    set_number("RANK", rank);
    set_number("WORLD_SIZE", j->ranks);
    o.kind = COMM_TCP;
    o.timeout = o.timeout > 0 ? o.timeout : 30;
    if (j->secret[rank] != NULL)
        o.secret = j->secret[rank];
    int st = world_open(&w, &o, &e);
    if (st == ST_OK)
        st = world_finish(w, (j->body != NULL ? j->body : sum_of_ranks)(w, &e), &e);
    if (st != ST_OK && e.msg[0] != '\0')
        err_print(&e, stderr);
    world_close(w);
    _exit(st);
}

static void start_rank(struct job *j, int rank)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    j->pid[rank] = fork();
    assert_true(j->pid[rank] >= 0);
    if (j->pid[rank] == 0)
        rank_main(j, rank, ends[1]);
    close(ends[1]);
    j->said[rank] = ends[0];
}

/* The exit code of a rank; text: what it wrote to stderr. */
static int end_of_rank(struct job *j, int rank, char *text, size_t size)
{
    int status = 0;
    size_t n = 0;
    for (ssize_t k = 1; k > 0 && n + 1 < size; n += k > 0 ? (size_t)k : 0)
        k = read(j->said[rank], text + n, size - 1 - n);
    text[n] = '\0';
    close(j->said[rank]);
    assert_int_equal(waitpid(j->pid[rank], &status, 0), j->pid[rank]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void all_succeed(struct job *j)
{
    for (int r = 0; r < j->ranks; r++) {
        char text[4096];
        int code = end_of_rank(j, r, text, sizeof text);
        if (code != 0)
            print_message("rank %d: exit code %d, %s\n", r, code, text);
        assert_int_equal(code, 0);
    }
}

static void run_all(struct job *j)
{
    for (int r = 0; r < j->ranks; r++)
        start_rank(j, r);
    all_succeed(j);
}

/* ---- strangers ------------------------------------------------------------------------------- */

static struct sockaddr_in local(int port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
}

/* Listens like torchrun's agent: it accepts, and never answers. */
static int hold_port(int *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

static int free_port(void)
{
    int port, fd = hold_port(&port);
    close(fd);
    return port;
}

/* Connects once somebody listens there. */
static int visit(int port)
{
    struct sockaddr_in a = local(port);
    for (int i = 0; i < 400; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
        usleep(25000);
    }
    fail_msg("nobody listens at port %d", port);
    return -1;
}

static void ranks_meet(void **state)
{
    (void)state;
    run_all(&(struct job){.ranks = RANKS, .port = free_port()});
}

static void a_taken_master_port_is_passed_over(void **state)
{
    (void)state;
    struct job j = {.ranks = 3};
    int agent = hold_port(&j.port);
    run_all(&j); /* the agent does not say that it keeps the port */
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    setenv("TORCHELASTIC_RUN_ID", "a-run", 1);
    run_all(&j);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    unsetenv("TORCHELASTIC_RUN_ID");
    close(agent);
}

static void a_taken_parallel_port_is_an_error_that_names_it(void **state)
{
    (void)state;
    struct job j = {.ranks = 2, .port = free_port(), .o = {.timeout = 5}};
    int agent = hold_port(&j.o.port);
    char text[4096], port[16];
    snprintf(port, sizeof port, "%d", j.o.port);
    start_rank(&j, 0);
    assert_int_equal(end_of_rank(&j, 0, text, sizeof text), ST_PEER);
    assert_non_null(strstr(text, port));
    assert_non_null(strstr(text, "Address already in use"));
    assert_non_null(strstr(text, "parallel.port"));
    close(agent);
}

/* More than there are places for, so that some are turned away for others; some of them talk. */
static void strangers_hold_up_nobody(void **state)
{
    (void)state;
    enum { VISITORS = 300 };
    int fd[VISITORS];
    struct job j = {.ranks = RANKS, .port = free_port()};
    start_rank(&j, 0);
    for (int i = 0; i < VISITORS; i++) {
        fd[i] = visit(j.port);
        if (i % 3 == 1)
            assert_true(send(fd[i], "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) != 0);
        if (i % 3 == 2)
            assert_true(send(fd[i], &hand_magic, sizeof hand_magic, MSG_NOSIGNAL) != 0); /* begins well, then silence */
    }
    for (int r = 1; r < j.ranks; r++)
        start_rank(&j, r);
    all_succeed(&j);
    for (int i = 0; i < VISITORS; i++)
        close(fd[i]);
}

/* ---- secrets --------------------------------------------------------------------------------- */

static void ranks_with_one_secret_meet(void **state)
{
    (void)state;
    setenv("JOB_SECRET", "sixteen bytes or more of it", 1);
    run_all(&(struct job){.ranks = RANKS, .port = free_port(), .o = {.secret = "env:JOB_SECRET"}});
}

static void another_secret_is_refused_by_both_sides(void **state)
{
    (void)state;
    struct job j = {.ranks = 2,
                    .port = free_port(),
                    .o = {.secret = "env:JOB_SECRET", .timeout = 8},
                    .secret = {NULL, "env:OTHER_SECRET"}};
    char text[4096];
    setenv("JOB_SECRET", "sixteen bytes or more of it", 1);
    setenv("OTHER_SECRET", "something else of enough bytes", 1);
    for (int r = 0; r < 2; r++)
        start_rank(&j, r);
    assert_int_equal(end_of_rank(&j, 1, text, sizeof text), ST_PEER);
    assert_non_null(strstr(text, "another secret"));
    assert_int_equal(end_of_rank(&j, 0, text, sizeof text), ST_PEER);
    assert_non_null(strstr(text, "did not know the secret"));
    assert_non_null(strstr(text, "parallel.secret"));
}

/* One that plays rank 1 without the secret neither gets in nor keeps the real one out. */
static void an_impostor_does_not_take_a_place(void **state)
{
    (void)state;
    struct job j = {.ranks = 2, .port = free_port(), .o = {.secret = "env:JOB_SECRET"}};
    setenv("JOB_SECRET", "sixteen bytes or more of it", 1);
    start_rank(&j, 0);
    int fd = visit(j.port);
    struct hand h;
    const struct hand_job guess = {.job = hash64_str("", (uint64_t)j.port), .key = "guessed secret, long", .n_key = 20};
    const uint8_t nonce[HAND_NONCE_BYTES] = {1, 2, 3};
    uint8_t bytes[sizeof(struct hand_hello)];
    hand_open_client(&h, &guess, &(struct hand_hello){.rank = 1, .size = 2, .port = 1}, nonce);
    assert_int_equal(send(fd, h.out, h.n_out, MSG_NOSIGNAL), h.n_out);
    hand_sent(&h, h.n_out);
    ssize_t n = recv(fd, bytes, h.want, MSG_WAITALL);
    assert_int_equal(n, sizeof(struct hand_challenge));
    assert_int_equal(hand_take(&h, &guess, bytes, (size_t)n), HAND_SECRET);
    uint8_t proof[SHA256_BYTES] = {7}; /* it goes on all the same */
    assert_int_equal(send(fd, proof, sizeof proof, MSG_NOSIGNAL), sizeof proof);
    assert_true(recv(fd, bytes, 1, 0) <= 0); /* and is thrown out */
    close(fd);
    start_rank(&j, 1);
    all_succeed(&j);
}

static void secrets_that_cannot_be_read_are_errors(void **state)
{
    (void)state;
    static const char *const wrong[][2] = {
        {"env:NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE"}, {"env:SHORT", "at least 16"}, {"/no/such/file", "/no/such/file"}};
    setenv("SHORT", "short", 1);
    for (int i = 0; i < countof(wrong); i++) {
        struct job j = {.ranks = 2, .port = free_port(), .o = {.secret = wrong[i][0], .timeout = 5}};
        char text[4096];
        start_rank(&j, 0);
        assert_int_not_equal(end_of_rank(&j, 0, text, sizeof text), 0);
        assert_non_null(strstr(text, wrong[i][1]));
    }
}

/* ---- addresses ------------------------------------------------------------------------------- */

/* Rank 0 of a job on this host alone must not be reachable from others. */
static void listeners_bind_to_the_route_of_master_addr(void **state)
{
    (void)state;
    struct job j = {.ranks = 2, .port = free_port()};
    char line[512], wanted[32], text[4096];
    int found = 0;
    start_rank(&j, 0);
    close(visit(j.port));
    snprintf(wanted, sizeof wanted, ":%04X 00000000:0000 0A", (unsigned)j.port);
    FILE *f = fopen("/proc/net/tcp", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strstr(line, wanted) != NULL) {
            found++;
            assert_non_null(strstr(line, "0100007F:")); /* 127.0.0.1 */
        }
    if (f != NULL) {
        fclose(f);
        assert_int_equal(found, 1);
    }
    kill(j.pid[0], SIGKILL);
    end_of_rank(&j, 0, text, sizeof text);
}

static void a_loopback_name_listens_everywhere(void **state)
{
    (void)state;
    struct tcp_address a = {.length = sizeof(struct sockaddr_in)}, out;
    *(struct sockaddr_in *)&a.at = local(1);
    tcp_listen_address(&a, false, &out);
    assert_true(tcp_is_loopback(&out));
    tcp_listen_address(&a, true, &out);
    assert_int_equal(((struct sockaddr_in *)&out.at)->sin_addr.s_addr, INADDR_ANY);
    ((struct sockaddr_in *)&a.at)->sin_addr.s_addr =
        htonl(0xC0000201); /* 192.0.2.1 is nobody's: the route's source address, or all */
    tcp_listen_address(&a, false, &out);
    assert_int_not_equal(((struct sockaddr_in *)&out.at)->sin_addr.s_addr, htonl(0xC0000201));
}

/* ---- messages that nobody asked for ---------------------------------------------------------- */

enum { FLOOD_BYTES = 1 << 16, FLOOD_MESSAGES = 64 };
static int flood(struct world *w, struct err *e)
{
    static char data[FLOOD_BYTES];
    if (world_rank(w) == 1)
        for (int i = 0; i < FLOOD_MESSAGES; i++)
            TRY(comm_host_send(world_comm(w), "flood", data, sizeof data, 0, e));
    return comm_barrier(world_comm(w), "after the flood", e);
}

static void messages_ahead_are_bounded(void **state)
{
    (void)state;
    struct job j = {
        .ranks = 2, .port = free_port(), .body = flood, .o = {.queue_bytes = FLOOD_BYTES * (FLOOD_MESSAGES + 1)}};
    char text[4096];
    run_all(&j); /* within the bound */
    j.o.queue_bytes = FLOOD_BYTES * FLOOD_MESSAGES / 2;
    j.port = free_port();
    for (int r = 0; r < 2; r++)
        start_rank(&j, r);
    assert_int_equal(end_of_rank(&j, 0, text, sizeof text), ST_PEER);
    assert_non_null(strstr(text, "rank 1 sent"));
    end_of_rank(&j, 1, text, sizeof text); /* it may have had its answer before */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_meet),
        cmocka_unit_test(a_taken_master_port_is_passed_over),
        cmocka_unit_test(a_taken_parallel_port_is_an_error_that_names_it),
        cmocka_unit_test(strangers_hold_up_nobody),
        cmocka_unit_test(ranks_with_one_secret_meet),
        cmocka_unit_test(another_secret_is_refused_by_both_sides),
        cmocka_unit_test(an_impostor_does_not_take_a_place),
        cmocka_unit_test(secrets_that_cannot_be_read_are_errors),
        cmocka_unit_test(listeners_bind_to_the_route_of_master_addr),
        cmocka_unit_test(a_loopback_name_listens_everywhere),
        cmocka_unit_test(messages_ahead_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
