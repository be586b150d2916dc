/* Facts of a report about the machine and the process: version, host, device, memory, command
 * line. */
#include "train/facts_int.h"

#include "base/version.h"

#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { MAX_COMMAND = 64 * 1024 };

/* A word of the command line as a shell would take it back. */
static void add_word(struct buf *b, const char *word)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=./,:@%";
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        buf_add(b, word);
        return;
    }
    buf_add(b, "'");
    for (; *word != '\0'; word++)
        if (*word == '\'')
            buf_add(b, "'\\''");
        else
            buf_add_n(b, word, 1);
    buf_add(b, "'");
}

void facts_command(struct buf *out)
{
    FILE *f = fopen("/proc/self/cmdline", "rb");
    char *text = f != NULL ? malloc(MAX_COMMAND + 1) : NULL;
    size_t n = text != NULL ? fread(text, 1, MAX_COMMAND, f) : 0;
    if (f != NULL)
        fclose(f);
    for (size_t at = 0; at < n; at += strlen(text + at) + 1) {
        text[n] = '\0';
        if (at > 0)
            buf_add(out, " ");
        add_word(out, text + at);
    }
    free(text);
}

int64_t facts_memory(const struct trainer *t) { return memory_total(&t->model.mem, t->model.mem.allocated, false); }

void facts_machine(const struct trainer *t, struct buf *out)
{
    struct utsname host;
    struct sysinfo ram;
    char text[32], mesh[160];
    buf_addf(out, "braid    %s\n", version_text());
    if (uname(&host) == 0)
        buf_addf(out, "host     %s, %s %s, %s\n", host.nodename, host.sysname, host.release, host.machine);
    if (sysinfo(&ram) == 0)
        buf_addf(out, "cores    %ld, %s of memory\n", sysconf(_SC_NPROCESSORS_ONLN),
                 human_bytes((double)ram.totalram * ram.mem_unit, text, sizeof text));
    buf_addf(out, "device   %s\n", t->dev.name);
    if (t->model.mesh.world > 1)
        buf_addf(out, "ranks    %d: %s\n", t->model.mesh.world, mesh_text(&t->model.mesh, mesh, sizeof mesh));
    buf_addf(out, "memory   %s planned and allocated%s\n", human_bytes((double)facts_memory(t), text, sizeof text),
             t->model.mesh.world > 1 ? " on this rank" : "");
    for (int a = 0; a < ARENA_ALL; a++)
        if (t->model.mem.allocated[a] > 0)
            buf_addf(out, "         %-12s %s%s\n", arena_name((enum arena_id)a),
                     human_bytes((double)t->model.mem.allocated[a], text, sizeof text),
                     memory_on_host(&t->model.mem, a) ? " in host memory" : "");
}
