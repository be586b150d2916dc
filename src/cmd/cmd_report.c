/* braid report: the page of a run written anew, or one page that compares runs. */
#include "cmd/cmd.h"
#include "log/report.h"

#include <string.h>

static const char usage[] = "usage: braid report RUN                      writes RUN/report.html "
                            "anew from its metrics.jsonl and config.ini\n"
                            "       braid report RUN RUN ... [--out=FILE] writes one page that "
                            "compares runs (compare.html)\n\n"
                            "Loss by step, tokens and time, key numbers, the options that differ. "
                            "The page needs no network and no scripts.\n";

enum { MAX_WORDS = 24 };

static int run(int argc, char **argv, struct err *e)
{
    const char *dir[MAX_WORDS], *out = NULL;
    int n = 0;
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (strncmp(argv[i], "--out", 5) == 0 && (argv[i][5] == '=' || argv[i][5] == '\0')) {
            value = argv[i][5] == '=' ? argv[i] + 6 : ++i < argc ? argv[i] : "";
            if (value[0] == '\0' || out != NULL)
                return err_set(e, ST_USAGE, out != NULL ? "--out is given twice" : "--out needs the name of a file");
            out = value;
        } else if (argv[i][0] == '-' && argv[i][1] != '\0') {
            err_set(e, ST_USAGE, "unknown option '%s'", argv[i]);
            return err_hint(e, "braid report takes folders of runs and --out=FILE");
        } else if (n == MAX_WORDS) {
            return err_set(e, ST_USAGE, "more than %d runs do not fit on a page", MAX_WORDS);
        } else {
            dir[n++] = argv[i];
        }
    }
    if (n == 0) {
        err_set(e, ST_USAGE, "no run is named");
        return err_hint(e, "braid report runs/a writes its report anew, braid report runs/a runs/b "
                           "compares the two");
    }
    if (n == 1 && out == NULL) {
        TRY(report_from_run(dir[0], e));
        printf("%s/report.html\n", dir[0]);
        return ST_OK;
    }
    out = out != NULL ? out : "compare.html";
    TRY(report_compare(dir, n, out, e));
    printf("%s\n", out);
    return ST_OK;
}

int cmd_report(int argc, char **argv)
{
    struct err e = {0};
    if (cmd_wants_help(argc, argv, usage, false))
        return 0;
    return cmd_exit(run(argc, argv, &e), &e);
}
