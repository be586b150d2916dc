/* Fails the N-th call of every kind in every command, one run per call (fault.c), and judges each: no crash, no hang,
 * no wrong result with exit code 0, a message with any other; and where the command writes, the next run without a
 * fault brings the result and leaves nothing behind. Kills at every call that changes the disk are faults like others.
 *
 *   torture BRAID FAULT.so ROOT [--seconds=S] [--seed=N] [--only=NAME[:CALL[:N]]] [--part=K/N]
 *
 * With --seconds a random sample, at least one of each kind and command; else everything, allocations of the larger
 * commands sampled. The last line is "N passed, N failed", a command with a kind of call being one. */
#include "scenarios.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const kinds[] = {"alloc", "write", "short_write", "read",   "fsync",  "close",       "rename",
                                    "open",  "mmap",  "stat",        "thread", "folder", "kill_before", "kill_after"};
enum { KINDS = countof(kinds), MOST_SCENARIOS = 32, SAMPLED_ALLOCS = 700, MOST_WORKERS = 64 };

struct job {
    int scenario, kind;
    long n;
};
struct tally {
    atomic_long tried, hit, bad;
};
struct shared { /* by the workers */
    atomic_long next;
    struct tally t[MOST_SCENARIOS][KINDS];
};
struct torture {
    struct place place;
    const char *fault, *only;
    char work[512];
    double deadline; /* 0: none */
    struct job *jobs;
    long n_jobs, must;  /* the first `must` are run whatever the time */
    long part, n_parts; /* one of several machines: jobs part, part + n_parts, ... */
    struct shared *shared;
};

static bool kills(int kind) { return str_starts(kinds[kind], "kill"); }

/* ---- one fault ------------------------------------------------------------------------------- */

static void report(const struct job *j, const char *dir, const char *tag, const char *what)
{
    printf("not ok torture %s:%s:%ld: %s\n", scenarios[j->scenario].name, kinds[j->kind], j->n, what);
    print_tail(dir, tag);
    fflush(stdout);
}

static bool was_hit(const char *path)
{
    char *text;
    size_t n;
    if (file_read(path, 1 << 16, &text, &n, NULL) != ST_OK)
        return true; /* it died before the end */
    bool hit = strstr(text, "hit 1") != NULL;
    free(text);
    return hit;
}

/* The next run, without a fault. */
static bool recovers(const struct torture *t, const struct job *j, const char *dir, char *why, size_t size)
{
    const struct scenario *s = &scenarios[j->scenario];
    char what[1024];
    if (!s->again && same_results(&t->place, s, dir, "fault", what, sizeof what))
        return true; /* it was done when the fault came, and refuses to do it twice */
    int status = run_scenario(&t->place, s, dir, NULL, true, "again");
    if (status != 0)
        snprintf(why, size, "the next run fails (status %d)", status);
    else if (!same_results(&t->place, s, dir, "again", what, sizeof what))
        snprintf(why, size, "after the next run: %s", what);
    else if (said(dir, "again", "cannot be used"))
        snprintf(why, size, "the next run finds a damaged checkpoint");
    else if (has_leftovers(dir, what, sizeof what))
        snprintf(why, size, "the next run leaves %s", what);
    else
        return true;
    return false;
}

static void one_fault(const struct torture *t, const struct job *j, int worker)
{
    const struct scenario *s = &scenarios[j->scenario];
    struct tally *tally = &t->shared->t[j->scenario][j->kind];
    char dir[600], call[64], n[64], rep[700], preload[4096], why[2048] = "", what[1024];
    snprintf(dir, sizeof dir, "%s/%d", t->work, worker);
    snprintf(call, sizeof call, "TORTURE_CALL=%s", kinds[j->kind]);
    snprintf(n, sizeof n, "TORTURE_N=%ld", j->n);
    snprintf(rep, sizeof rep, "TORTURE_REPORT=%s.report", dir);
    snprintf(preload, sizeof preload, "LD_PRELOAD=%s", t->fault);
    const char *env[] = {call, n, rep, preload, NULL};
    unlink(rep + strlen("TORTURE_REPORT="));
    int status = run_scenario(&t->place, s, dir, env, false, "fault");
    bool hit = was_hit(rep + strlen("TORTURE_REPORT="));
    const char *tag = "fault";
    atomic_fetch_add(&tally->tried, 1);
    atomic_fetch_add(&tally->hit, hit);
    if (WIFSIGNALED(status) && !(kills(j->kind) && WTERMSIG(status) == SIGKILL))
        snprintf(why, sizeof why, WTERMSIG(status) == SIGALRM ? "it hangs" : "it crashes: %s",
                 strsignal(WTERMSIG(status)));
    else if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !same_results(&t->place, s, dir, tag, what, sizeof what))
        snprintf(why, sizeof why, "exit code 0 with a wrong result: %s", what);
    else if (WIFEXITED(status) && WEXITSTATUS(status) != 0 && !hit)
        snprintf(why, sizeof why, "it fails (exit code %d) without a fault", WEXITSTATUS(status));
    else if (WIFEXITED(status) && WEXITSTATUS(status) != 0 && !said_something(dir, tag))
        snprintf(why, sizeof why, "it fails (exit code %d) without a word", WEXITSTATUS(status));
    else if (!files_fit(&t->place, s, dir))
        snprintf(why, sizeof why, "an old file stands beside a new one");
    else if (status != 0 && s->files[0] != NULL && !recovers(t, j, dir, why, sizeof why))
        tag = "again";
    if (why[0] == '\0')
        return;
    atomic_fetch_add(&tally->bad, 1);
    report(j, dir, tag, why);
}

static void work(const struct torture *t, int worker)
{
    for (;;) {
        long i = t->part + t->n_parts * atomic_fetch_add(&t->shared->next, 1);
        if (i >= t->n_jobs || (i >= t->must && t->deadline > 0 && time_now() > t->deadline))
            return;
        one_fault(t, &t->jobs[i], worker);
    }
}

/* ---- which faults ---------------------------------------------------------------------------- */

static bool wanted(const struct torture *t, int scenario, int kind, long n)
{
    char name[128];
    if (t->only == NULL)
        return true;
    snprintf(name, sizeof name, "%s:%s:%ld", scenarios[scenario].name, kinds[kind], n);
    size_t len = strlen(t->only);
    return strncmp(name, t->only, len) == 0 && (name[len] == '\0' || name[len] == ':');
}

static bool count_calls(const struct torture *t, int scenario, long *counts)
{
    char dir[600], rep[700], preload[4096], *text;
    size_t len;
    snprintf(dir, sizeof dir, "%s/count", t->work);
    snprintf(rep, sizeof rep, "TORTURE_REPORT=%s.report", dir);
    snprintf(preload, sizeof preload, "LD_PRELOAD=%s", t->fault);
    const char *env[] = {"TORTURE_N=0", rep, preload, NULL};
    int status = run_scenario(&t->place, &scenarios[scenario], dir, env, false, "count");
    if (status != 0 || file_read(rep + strlen("TORTURE_REPORT="), 1 << 16, &text, &len, NULL) != ST_OK) {
        printf("torture: '%s' fails under the library that counts (status %d)\n", scenarios[scenario].name, status);
        print_tail(dir, "count");
        return false;
    }
    for (int k = 0; k < KINDS; k++) {
        char name[64];
        snprintf(name, sizeof name, "%s ", kinds[k]);
        const char *at = strstr(text, name);
        while (at != NULL && at != text && at[-1] != '\n')
            at = strstr(at + 1, name);
        counts[k] = at != NULL ? atol(at + strlen(name)) : 0;
    }
    free(text);
    return true;
}

static bool add_job(struct torture *t, size_t *cap, int scenario, int kind, long n)
{
    if (!wanted(t, scenario, kind, n))
        return true;
    if (mem_grow((void **)&t->jobs, cap, (size_t)t->n_jobs + 1, sizeof *t->jobs, NULL) != ST_OK)
        return false;
    t->jobs[t->n_jobs++] = (struct job){scenario, kind, n};
    return true;
}

static void swap(struct job *a, struct job *b)
{
    struct job c = *a;
    *a = *b;
    *b = c;
}

/* One of each command and kind first, in random order; then the rest, in random order. */
static void shuffle(struct torture *t, uint64_t seed)
{
    bool seen[MOST_SCENARIOS][KINDS] = {0};
    for (long i = t->n_jobs - 1; i > 0; i--)
        swap(&t->jobs[i], &t->jobs[rng_below(seed, (uint64_t)i, (uint64_t)i + 1)]);
    t->must = 0;
    for (long i = 0; i < t->n_jobs; i++) {
        bool *s = &seen[t->jobs[i].scenario][t->jobs[i].kind];
        if (!*s)
            swap(&t->jobs[i], &t->jobs[t->must++]);
        *s = true;
    }
}

static bool plan_jobs(struct torture *t, uint64_t seed)
{
    size_t cap = 0;
    for (int s = 0; s < n_scenarios; s++) {
        long counts[KINDS];
        if (!count_calls(t, s, counts))
            return false;
        for (int k = 0; k < KINDS; k++) {
            bool sampled = k == 0 && !scenarios[s].small && t->only == NULL && counts[k] > SAMPLED_ALLOCS;
            for (long i = 1; i <= (sampled ? SAMPLED_ALLOCS : counts[k]); i++) {
                long n = sampled ? 1 + (long)rng_below(seed + (uint64_t)s, (uint64_t)i, (uint64_t)counts[k]) : i;
                if (!add_job(t, &cap, s, k, n))
                    return false;
            }
        }
    }
    shuffle(t, seed);
    return true;
}

/* ---- results --------------------------------------------------------------------------------- */

static int summary(const struct torture *t)
{
    long passed = 0, failed = 0, tried = 0, hit = 0, bad = 0;
    printf("\n%-10s", "faults");
    for (int k = 0; k < KINDS; k++)
        printf(" %11s", kinds[k]);
    printf("\n");
    for (int s = 0; s < n_scenarios; s++) {
        printf("%-10s", scenarios[s].name);
        for (int k = 0; k < KINDS; k++) {
            const struct tally *x = &t->shared->t[s][k];
            passed += x->tried > 0 && x->bad == 0;
            failed += x->bad > 0;
            tried += x->tried;
            hit += x->hit;
            bad += x->bad;
            printf(" %11ld", (long)x->hit);
        }
        printf("\n");
    }
    printf("%ld runs, %ld faults injected, %ld findings\n%ld passed, %ld failed\n", tried, hit, bad, passed, failed);
    return failed > 0 || tried == 0;
}

int main(int argc, char **argv)
{
    struct torture t = {.n_parts = 1};
    uint64_t seed = 1;
    if (argc < 4) {
        fprintf(stderr,
                "usage: torture BRAID FAULT.so ROOT [--seconds=S] [--seed=N] [--only=NAME[:CALL[:N]]] [--part=K/N]\n");
        return 2;
    }
    char base[600];
    snprintf(t.work, sizeof t.work, "%s/braid-torture-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(t.work) == NULL)
        return 2;
    snprintf(base, sizeof base, "%s/base", t.work);
    t.place = (struct place){.braid = argv[1], .root = argv[3], .base = base};
    t.fault = argv[2];
    for (int i = 4; i < argc; i++) {
        if (str_starts(argv[i], "--seconds="))
            t.deadline = time_now() + atof(argv[i] + 10);
        if (str_starts(argv[i], "--seed="))
            seed = strtoull(argv[i] + 7, NULL, 10);
        if (str_starts(argv[i], "--only="))
            t.only = argv[i] + 7;
        if (str_starts(argv[i], "--part=") &&
            (sscanf(argv[i] + 7, "%ld/%ld", &t.part, &t.n_parts) != 2 || t.part < 0 || t.part >= t.n_parts)) {
            fprintf(stderr, "torture: %s: K of 0 to N - 1 is wanted, as in --part=0/4\n", argv[i]);
            return 2;
        }
    }
    t.shared = mmap(NULL, sizeof *t.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int code = 1;
    if (t.shared != MAP_FAILED && file_make_dirs(base, NULL) == ST_OK && prepare_base(&t.place) &&
        plan_jobs(&t, seed)) {
        printf("%ld faults planned, seed %llu\n", t.n_jobs, (unsigned long long)seed);
        fflush(stdout);
        pid_t workers[MOST_WORKERS];
        int n_workers = cpu_count() < 2 ? 2 : cpu_count() > MOST_WORKERS ? MOST_WORKERS : cpu_count();
        for (int w = 0; w < n_workers; w++)
            if ((workers[w] = fork()) == 0) {
                work(&t, w);
                _exit(0);
            }
        for (int w = 0; w < n_workers; w++)
            waitpid(workers[w], NULL, 0);
        code = summary(&t);
    } else
        printf("0 passed, 1 failed\n");
    free(t.jobs);
    file_remove_tree(t.work, NULL);
    return code;
}
