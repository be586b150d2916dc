/* TensorBoard event files; see tensorboard.h. */
#include "log/tensorboard_int.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Protobuf key bytes: field number << 3 | wire type. */
enum {
    EVENT_WALL_TIME = 0x09,
    EVENT_STEP = 0x10,
    EVENT_FILE_VERSION = 0x1A,
    EVENT_SUMMARY = 0x2A,
    EVENT_SESSION_LOG = 0x3A,
    SESSION_STATUS = 0x08,
    SUMMARY_VALUE = 0x0A,
    VALUE_TAG = 0x0A,
    VALUE_SIMPLE = 0x15,
    VALUE_TENSOR = 0x42,
    VALUE_METADATA = 0x4A,
    METADATA_PLUGIN = 0x0A,
    PLUGIN_NAME = 0x0A,
    TENSOR_DTYPE = 0x08,
    TENSOR_SHAPE = 0x12,
    TENSOR_STRING = 0x42,
    SHAPE_DIM = 0x12,
    DIM_SIZE = 0x08,
    DTYPE_STRING = 7,
    STATUS_START = 1,
    MAX_TEXT = 1 << 20,
};

uint32_t crc32c(const void *bytes, size_t n)
{
    /* Four bits at a time: a 16-entry table, fast enough for a few hundred bytes a step. */
    static const uint32_t nibble[16] = {
        0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1, 0x417B1DBC, 0x5125DAD3, 0x61C69362, 0x7198540D,
        0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9, 0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75,
    };
    uint32_t c = 0xFFFFFFFFu;
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) {
        c = nibble[(c ^ p[i]) & 15] ^ (c >> 4);
        c = nibble[(c ^ (p[i] >> 4)) & 15] ^ (c >> 4);
    }
    return c ^ 0xFFFFFFFFu;
}

/* ---- encoding -------------------------------------------------------------------------------- */

static void put_byte(struct buf *b, int v)
{
    uint8_t byte = (uint8_t)v;
    buf_add_n(b, &byte, 1);
}

static void put_varint(struct buf *b, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        put_byte(b, (int)(v & 0x7F) | 0x80);
    put_byte(b, (int)v);
}

static size_t varint_size(uint64_t v)
{
    size_t n = 1;
    for (; v >= 0x80; v >>= 7)
        n++;
    return n;
}

/* Little-endian whatever the machine. */
static void put_fixed(struct buf *b, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        put_byte(b, (int)(v >> (8 * i) & 0xFF));
}

static void put_bytes(struct buf *b, int key, const void *bytes, size_t n)
{
    put_byte(b, key);
    put_varint(b, n);
    buf_add_n(b, bytes, n);
}

static size_t field_size(size_t payload) { return 1 + varint_size(payload) + payload; }

static uint32_t masked_crc(const void *bytes, size_t n)
{
    uint32_t c = crc32c(bytes, n);
    return ((c >> 15) | (c << 17)) + 0xA282EAD8u;
}

/* The record's head (12 bytes) is left room for, so that record and head are one write. */
enum { RECORD_HEAD = 12 };

static void event_begin(struct tb_writer *w, double wall)
{
    static const char head[RECORD_HEAD] = {0};
    uint64_t bits;
    memcpy(&bits, &wall, sizeof bits);
    buf_clear(&w->event);
    buf_add_n(&w->event, head, sizeof head);
    put_byte(&w->event, EVENT_WALL_TIME);
    put_fixed(&w->event, bits, 8);
}

static void event_step(struct tb_writer *w, int64_t step)
{
    put_byte(&w->event, EVENT_STEP);
    put_varint(&w->event, (uint64_t)step);
}

static int event_write(struct tb_writer *w, struct err *e)
{
    TRY(buf_check(&w->event, e));
    uint8_t *head = (uint8_t *)w->event.text;
    uint64_t n = w->event.len - RECORD_HEAD;
    for (int i = 0; i < 8; i++)
        head[i] = (uint8_t)(n >> (8 * i));
    uint32_t crc = masked_crc(head, 8);
    for (int i = 0; i < 4; i++)
        head[8 + i] = (uint8_t)(crc >> (8 * i));
    put_fixed(&w->event, masked_crc(head + RECORD_HEAD, n), 4);
    TRY(buf_check(&w->event, e));
    return sink_write(&w->file, w->event.text, w->event.len, e);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* Readers walk the files of a folder in the order of their names, so the seconds in a new name must
 * be above all earlier ones, also after the clock went back or within one second. */
static int64_t next_stamp(const char *dir, int64_t now, bool *found, struct err *e, int *status)
{
    static const char prefix[] = "events.out.tfevents.";
    char **names;
    int n;
    *found = false;
    *status = file_list_dir(dir, &names, &n, e);
    if (*status != ST_OK)
        return now;
    for (int i = 0; i < n; i++)
        if (str_starts(names[i], prefix)) {
            long long stamp = strtoll(names[i] + sizeof prefix - 1, NULL, 10);
            *found = true;
            if (stamp >= now && stamp < 9999999999LL)
                now = stamp + 1;
        }
    file_free_list(names, n);
    return now;
}

static int open_file(struct tb_writer *w, const char *dir, int64_t stamp, struct err *e)
{
    char host[64] = "localhost", path[4096];
    if (gethostname(host, sizeof host) != 0 || host[0] == '\0')
        snprintf(host, sizeof host, "localhost");
    host[sizeof host - 1] = '\0';
    for (char *c = host; *c != '\0'; c++)
        if (!isalnum((unsigned char)*c) && *c != '.')
            *c = '-';
    int n =
        snprintf(path, sizeof path, "%s/events.out.tfevents.%010" PRId64 ".%s.%ld.0", dir, stamp, host, (long)getpid());
    if (n >= (int)sizeof path)
        return err_set(e, ST_INVALID, "path too long: %.200s...", dir);
    return sink_open(&w->file, path, O_EXCL, e);
}

int tb_open(struct tb_writer *w, const char *dir, double wall, struct err *e)
{
    *w = (struct tb_writer){.file = {.fd = -1}};
    buf_init(&w->summary, 0);
    buf_init(&w->event, 0);
    TRY(file_make_dirs(dir, e));
    int st;
    int64_t stamp = next_stamp(dir, (int64_t)wall, &w->had_files, e, &st);
    if (st == ST_OK)
        st = open_file(w, dir, stamp, e);
    if (st == ST_OK) {
        static const char version[] = "brain.Event:2";
        event_begin(w, wall);
        put_bytes(&w->event, EVENT_FILE_VERSION, version, sizeof version - 1);
        st = event_write(w, e);
    }
    if (st != ST_OK)
        tb_close(w, NULL);
    return st;
}

int tb_restart_at(struct tb_writer *w, int64_t step, double wall, struct err *e)
{
    static const uint8_t session[] = {SESSION_STATUS, STATUS_START};
    event_begin(w, wall);
    event_step(w, step);
    put_bytes(&w->event, EVENT_SESSION_LOG, session, sizeof session);
    return event_write(w, e);
}

void tb_begin(struct tb_writer *w) { buf_clear(&w->summary); }

void tb_add_scalar(struct tb_writer *w, const char *tag, double value)
{
    float v = (float)value;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    size_t n = strlen(tag);
    put_byte(&w->summary, SUMMARY_VALUE);
    put_varint(&w->summary, field_size(n) + 5);
    put_bytes(&w->summary, VALUE_TAG, tag, n);
    put_byte(&w->summary, VALUE_SIMPLE);
    put_fixed(&w->summary, bits, 4);
}

int tb_end(struct tb_writer *w, int64_t step, double wall, struct err *e)
{
    TRY(buf_check(&w->summary, e));
    if (w->summary.len == 0)
        return ST_OK;
    event_begin(w, wall);
    event_step(w, step);
    put_bytes(&w->event, EVENT_SUMMARY, w->summary.text, w->summary.len);
    return event_write(w, e);
}

/* TensorBoard shows text as Markdown; lines indented by four are shown verbatim. */
static void add_verbatim(struct buf *b, const char *text)
{
    struct buf clean;
    buf_init(&clean, MAX_TEXT);
    add_utf8(&clean, text);
    for (const char *line = clean.text != NULL ? clean.text : ""; *line != '\0';) {
        size_t n = strcspn(line, "\n");
        buf_add(b, "    ");
        buf_add_n(b, line, n);
        buf_add(b, "\n");
        line += n + (line[n] == '\n');
    }
    if (clean.failed)
        buf_add(b, "    (cut short)\n");
    buf_release(&clean);
}

int tb_text(struct tb_writer *w, const char *tag, const char *text, int64_t step, double wall, struct err *e)
{
    static const uint8_t shape[] = {SHAPE_DIM, 2, DIM_SIZE, 1};
    static const uint8_t metadata[] = {METADATA_PLUGIN, 6, PLUGIN_NAME, 4, 't', 'e', 'x', 't'};
    struct buf body, tensor, value;
    buf_init(&body, 0);
    buf_init(&tensor, 0);
    buf_init(&value, 0);
    buf_add(&body, "");
    add_verbatim(&body, text);
    int st = buf_check(&body, e);
    if (st == ST_OK) {
        put_byte(&tensor, TENSOR_DTYPE);
        put_byte(&tensor, DTYPE_STRING);
        put_bytes(&tensor, TENSOR_SHAPE, shape, sizeof shape);
        put_bytes(&tensor, TENSOR_STRING, body.text, body.len);
        st = buf_check(&tensor, e);
    }
    if (st == ST_OK) {
        put_bytes(&value, VALUE_TAG, tag, strlen(tag));
        put_bytes(&value, VALUE_TENSOR, tensor.text, tensor.len);
        put_bytes(&value, VALUE_METADATA, metadata, sizeof metadata);
        st = buf_check(&value, e);
    }
    if (st == ST_OK) {
        tb_begin(w);
        put_bytes(&w->summary, SUMMARY_VALUE, value.text, value.len);
        st = tb_end(w, step, wall, e);
    }
    buf_release(&body);
    buf_release(&tensor);
    buf_release(&value);
    return st;
}

int tb_close(struct tb_writer *w, struct err *e)
{
    buf_release(&w->summary);
    buf_release(&w->event);
    return sink_close(&w->file, e);
}
