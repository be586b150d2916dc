/* Which clients may connect: addresses, the names browsers use for them, and the token. */
#include "serve/serve.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { TOKEN_MIN = 16, TOKEN_MAX = 4096 };

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, a, sizeof in);
        return ntohl(in.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 in;
    memcpy(&in, a, sizeof in);
    return IN6_IS_ADDR_LOOPBACK(&in.sin6_addr) != 0;
}

int serve_address(struct serve_address *a, const char *host, int port, bool has_token, struct err *e)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    *a = (struct serve_address){.family = 0};
    int code = host[0] != '\0' ? getaddrinfo(host, service, &hints, &list) : EAI_NONAME;
    if (code != 0)
        return err_set(e, ST_USAGE, "--host=%s is no address of this machine: %s", host, gai_strerror(code));
    const struct addrinfo *first = list;
    while (first != NULL && first->ai_family != AF_INET && first->ai_family != AF_INET6)
        first = first->ai_next;
    bool fits = first != NULL && first->ai_addrlen <= sizeof a->bytes;
    if (fits) {
        memcpy(a->bytes, first->ai_addr, first->ai_addrlen);
        a->family = first->ai_family;
        a->loopback = is_loopback(first->ai_addr);
    }
    freeaddrinfo(list);
    if (!fits)
        return err_set(e, ST_USAGE, "--host=%s has neither an IPv4 nor an IPv6 address", host);
    if (!a->loopback && !has_token) {
        err_set(e, ST_USAGE, "--host=%s can be reached from other machines, and no token is asked for", host);
        return err_hint(
            e, "write a secret of at least %d characters to a file and give --token=FILE, or listen on 127.0.0.1",
            TOKEN_MIN);
    }
    return ST_OK;
}

bool serve_host_is_local(const char *header, const char *listening)
{
    char name[256];
    size_t n = strlen(header);
    if (header[0] == '[') {
        const char *end = strchr(header, ']');
        n = end != NULL ? (size_t)(end - header) + 1 : n;
    } else {
        n = strcspn(header, ":");
    }
    if (n == 0 || n >= sizeof name)
        return false;
    memcpy(name, header, n);
    name[n] = '\0';
    struct in_addr v4;
    if (inet_pton(AF_INET, name, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return strcasecmp(name, "localhost") == 0 || strcmp(name, "[::1]") == 0 || strcasecmp(name, listening) == 0;
}

int serve_read_token(const char *path, char **out, struct err *e)
{
    size_t n;
    *out = NULL;
    TRY(file_read(path, TOKEN_MAX, out, &n, e));
    n = strcspn(*out, "\r\n");
    (*out)[n] = '\0';
    bool good = n >= TOKEN_MIN;
    for (size_t i = 0; i < n; i++)
        good = good && (*out)[i] > 0x20 && (*out)[i] < 0x7F;
    if (good)
        return ST_OK;
    free(*out);
    *out = NULL;
    err_set(e, ST_USAGE, "%s: the first line is no token: at least %d printable characters without spaces", path,
            TOKEN_MIN);
    return err_hint(e, "for example: head -c 24 /dev/urandom | base64 > FILE; chmod 600 FILE");
}
