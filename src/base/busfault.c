/* What happens when a mapped file cannot be read any more; see busfault.h. The handler finds the file's name in the
 * process's list of maps, with calls that are allowed in a signal handler alone. */
#include "base/busfault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { LINE_MOST = 4608 }; /* of the list of maps: a path and the numbers before it */

static void say(const char *text, size_t n)
{
    while (n > 0) {
        ssize_t done = write(STDERR_FILENO, text, n);
        if (done <= 0)
            return; /* nobody listens */
        text += done;
        n -= (size_t)done;
    }
}

static void say_text(const char *text) { say(text, strlen(text)); }

static const char *read_hex(const char *at, uintptr_t *out)
{
    for (*out = 0;; at++)
        if (*at >= '0' && *at <= '9')
            *out = *out << 4 | (uintptr_t)(*at - '0');
        else if (*at >= 'a' && *at <= 'f')
            *out = *out << 4 | (uintptr_t)(*at - 'a' + 10);
        else
            return at;
}

/* Says the path in a line "begin-end rights offset device inode path" if the address is in it. */
static int say_if_holds(const char *line, uintptr_t address)
{
    uintptr_t begin, end;
    const char *at = read_hex(line, &begin), *path = strchr(line, '/');
    if (*at != '-')
        return 0;
    read_hex(at + 1, &end);
    if (address < begin || address >= end || path == NULL)
        return 0;
    say_text(path);
    return 1;
}

static int say_file_at(uintptr_t address)
{
    char line[LINE_MOST], part[1024];
    size_t used = 0;
    ssize_t n;
    int said = 0, fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && !said && (n = read(fd, part, sizeof part)) > 0)
        for (ssize_t i = 0; i < n && !said; i++) {
            if (part[i] != '\n' && used < sizeof line - 1) {
                line[used++] = part[i];
                continue;
            }
            line[used] = '\0';
            said = say_if_holds(line, address);
            used = 0;
        }
    if (fd >= 0)
        close(fd);
    return said;
}

static void on_bus_fault(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    say_text("braid: error: ");
    if (!say_file_at((uintptr_t)info->si_addr))
        say_text("a mapped file");
    say_text(" became shorter while it was read, or its disk has an error\n  hint: put the file back as it was and "
             "start the command again\n");
    _exit(1);
}

void busfault_report(void)
{
    struct sigaction action = {.sa_sigaction = on_bus_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    (void)sigaction(SIGBUS, &action, NULL); /* refused only for a number that does not exist */
}
