/* UTF-8, base64, and the byte alphabet of GPT-2: the encodings in which tokens are written down. */
#include "token/token_int.h"

size_t utf8_valid_len(const uint8_t *p, const uint8_t *end)
{
    size_t left = (size_t)(end - p);
    uint8_t c = p[0];
    if (c < 0x80)
        return 1;
    if (c < 0xC2 || c > 0xF4)
        return 0;
    size_t n = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (left < n)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    /* Overlong forms, surrogates, and code points past U+10FFFF show in the second byte. */
    if ((c == 0xE0 && p[1] < 0xA0) || (c == 0xED && p[1] > 0x9F) || (c == 0xF0 && p[1] < 0x90) ||
        (c == 0xF4 && p[1] > 0x8F))
        return 0;
    return n;
}

const uint8_t *utf8_check(const uint8_t *p, const uint8_t *end)
{
    while (p < end) {
        uint64_t word;
        if (end - p >= 8 && (memcpy(&word, p, 8), (word & 0x8080808080808080u) == 0)) {
            p += 8;
            continue;
        }
        size_t n = utf8_valid_len(p, end);
        if (n == 0)
            return p;
        p += n;
    }
    return end;
}

size_t utf8_put(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xC0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xE0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 63));
        out[2] = (uint8_t)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 63));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 63));
    out[3] = (uint8_t)(0x80 | (c & 63));
    return 4;
}

static int base64_value(char c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

int64_t base64_decode(const char *text, size_t n, uint8_t *out)
{
    if (n % 4 != 0)
        return -1;
    size_t pad = n > 0 && text[n - 1] == '=' ? (text[n - 2] == '=' ? 2 : 1) : 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 4; k++) {
            int v = i + k >= n - pad ? 0 : base64_value(text[i + k]);
            if (v < 0)
                return -1;
            bits = bits << 6 | (uint32_t)v;
        }
        out[at++] = (uint8_t)(bits >> 16);
        out[at++] = (uint8_t)(bits >> 8);
        out[at++] = (uint8_t)bits;
    }
    return (int64_t)(at - pad);
}

void base64_encode(const uint8_t *bytes, size_t n, struct buf *out)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        size_t left = n - i < 3 ? n - i : 3;
        uint32_t bits =
            (uint32_t)bytes[i] << 16 | (left > 1 ? (uint32_t)bytes[i + 1] << 8 : 0) | (left > 2 ? bytes[i + 2] : 0u);
        char four[4] = {digits[bits >> 18], digits[bits >> 12 & 63], left > 1 ? digits[bits >> 6 & 63] : '=',
                        left > 2 ? digits[bits & 63] : '='};
        buf_add_n(out, four, 4);
    }
}

/* Bytes that are visible characters of Latin-1 stand for themselves; the other 68 are U+0100 and
 * on, in order. */
static bool alphabet_plain(uint32_t c)
{
    return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

int alphabet_byte(uint32_t c)
{
    if (alphabet_plain(c))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68)
        return -1;
    uint32_t k = c - 0x100; /* the k-th byte that is not plain: 0x00-0x20, 0x7F-0xA0, 0xAD */
    return k < 33 ? (int)k : k < 67 ? (int)(k - 33 + 0x7F) : 0xAD;
}

uint32_t alphabet_char(uint8_t byte)
{
    if (alphabet_plain(byte))
        return byte;
    return byte <= 0x20 ? 0x100u + byte : byte <= 0xA0 ? 0x100u + 33u + (byte - 0x7Fu) : 0x100u + 67u;
}

int64_t alphabet_decode(const char *text, size_t n, uint8_t *out)
{
    const uint8_t *p = (const uint8_t *)text, *end = p + n;
    int64_t at = 0;
    while (p < end) {
        size_t len = utf8_valid_len(p, end);
        if (len == 0)
            return -1;
        int byte = alphabet_byte(utf8_at(p, &len));
        if (byte < 0)
            return -1;
        out[at++] = (uint8_t)byte;
        p += len;
    }
    return at;
}

size_t token_utf8(const void *text, size_t n)
{
    const uint8_t *p = text;
    return (size_t)(utf8_check(p, p + n) - p);
}
