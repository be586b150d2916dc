/* The entry of the one binary: which command, and a short help. */
#include "base/busfault.h"
#include "base/version.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
};

static const struct command commands[] = {
    {"train", cmd_train, "train a model, or continue a run"},
    {"generate", cmd_generate, "continue a prompt with a trained model"},
    {"eval", cmd_eval, "loss and bits per byte on validation data, or accuracy on multiple-choice tasks"},
    {"serve", cmd_serve, "answer completion requests over HTTP, with log-probabilities"},
    {"report", cmd_report, "write a run's report anew, or one page that compares runs"},
    {"plan", cmd_plan, "show parameters, FLOPs, memory and steps of a config, without running it"},
    {"gradcheck", cmd_gradcheck, "check every op's and a model's gradients by finite differences"},
    {"verify", cmd_verify, "run a small model of the configured kind on every mesh and schedule, and compare"},
    {"bench", cmd_bench, "time every op, or whole training steps, against this machine's roofline"},
    {"op", cmd_op, "run one op on tensors from a file"},
    {"grads", cmd_grads, "write loss, logits and all gradients of one batch to a file"},
    {"ckpt", cmd_ckpt, "list, verify and compare checkpoints"},
    {"import", cmd_import, "make a checkpoint of a Hugging Face model folder"},
    {"export", cmd_export, "write a checkpoint as a folder that transformers loads"},
    {"data", cmd_data, "turn text into token files, inspect them"},
    {"help", cmd_help, "this list; `braid help lr` explains options about something, `braid help train` a section"},
};

static void usage(FILE *out)
{
    fprintf(out, "braid trains language models from one C program.\n\nusage: braid COMMAND [FILE.ini] "
                 "[--section.key=value ...]\n\n");
    for (int i = 0; i < countof(commands); i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(out, "\nEach command explains itself: braid COMMAND --help. A first run: braid train configs/demo.ini "
                 "--data.train=FILE --run.dir=runs/a\n");
}

int cmd_help(int argc, char **argv)
{
    if (argc < 2) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "docs") == 0) {
        struct buf out;
        buf_init(&out, 0);
        config_write_docs(&out);
        fputs(out.text != NULL ? out.text : "", stdout);
        buf_release(&out);
        return 0;
    }
    bool section = config_has_section(argv[1]); /* data is both; the command's help is `braid data --help` */
    for (int i = 0; !section && i < countof(commands); i++)
        if (strcmp(commands[i].name, argv[1]) == 0 && commands[i].run != cmd_help) {
            char help[] = "--help";
            char *args[] = {argv[1], help, NULL};
            return commands[i].run(2, args);
        }
    int code = cmd_explain(argv[1]);
    for (int i = 0; section && i < countof(commands); i++)
        if (strcmp(commands[i].name, argv[1]) == 0)
            printf("\nThis is section [%s] of the options; the command explains itself: braid %s --help\n", argv[1],
                   argv[1]);
    return code;
}

/* Jansson's parser ends in an assertion when memory runs out inside of a string. */
static void *json_memory(size_t n)
{
    static const char text[] =
        "braid: error: out of memory reading or writing JSON\n  hint: what was saved before is untouched\n";
    void *p = malloc(n);
    if (p == NULL && n > 0) {
        ssize_t said = write(STDERR_FILENO, text, sizeof text - 1);
        (void)said;
        _exit(1);
    }
    return p;
}

/* A descriptor that is closed at the start would be given to the next file that is opened, and messages would go into
 * a log or a checkpoint. In the place of standard output stands one that cannot be written, so that results which
 * nobody gets are still an error. */
static bool open_standard_descriptors(void)
{
    static const int modes[] = {[STDIN_FILENO] = O_RDONLY, [STDOUT_FILENO] = O_RDONLY, [STDERR_FILENO] = O_WRONLY};
    for (int fd = 0; fd < countof(modes); fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", modes[fd]) != fd)
            return false;
    return true;
}

/* Results that were not written are not results. A reader that went away (`braid plan | head`) did so on purpose. */
static int check_output(int code)
{
    bool failed = ferror(stdout) != 0;
    errno = 0;
    failed |= fflush(stdout) != 0;
    if (!failed || code != 0)
        return code;
    if (errno == EPIPE)
        return 128 + SIGPIPE;
    fprintf(stderr, "braid: error: cannot write to standard output%s%s\n", errno ? ": " : "",
            errno ? strerror(errno) : "");
    fprintf(stderr, "  hint: is the disk full? What was printed is incomplete\n");
    return 1;
}

static int run_command(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("braid %s\n", version_text());
        return 0;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        usage(stdout);
        return 0;
    }
    const char *names[countof(commands)];
    for (int i = 0; i < countof(commands); i++) {
        names[i] = commands[i].name;
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    }
    const char *near = nearest_name(argv[1], names, countof(names));
    fprintf(stderr, "braid: error: unknown command '%s'\n", argv[1]);
    fprintf(stderr, near ? "  hint: did you mean '%s'?\n" : "  hint: `braid help` lists the commands\n", near);
    return 2;
}

int main(int argc, char **argv)
{
    signal(SIGXFSZ, SIG_IGN); /* a file over the limit is then a failed write, reported like a full disk */
    signal(SIGPIPE, SIG_IGN); /* a terminal or pipe that goes away loses messages, not the run */
    busfault_report();
    if (!open_standard_descriptors())
        return 1;
    json_set_alloc_funcs(json_memory, free);
    return check_output(run_command(argc, argv));
}
