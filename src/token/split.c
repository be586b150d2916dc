/* Splitters written by hand for the patterns of published tokenizers. Each gives the pieces that
 * its regex gives; tests compare them with PCRE2. A function returns the length of the match at p,
 * 0: none there.
 *
 * The alternatives of a regex are tried in order, so the first that matches wins, whatever its
 * length; the comments name the alternative that a part stands for. */
#include "token/token_int.h"

/* Class and length of the character at p; at the end 0 and length 0. */
static inline uint8_t class_at(const uint8_t *k, const uint8_t *p, const uint8_t *end, size_t *len)
{
    if (p >= end) {
        *len = 0;
        return 0;
    }
    if (*p < 0x80) {
        *len = 1;
        return k[*p];
    }
    return k[utf8_at(p, len)];
}

/* End of the run of characters that have one of the bits. */
static inline const uint8_t *run_of(const uint8_t *k, const uint8_t *p, const uint8_t *end, unsigned bits)
{
    size_t n;
    while (p < end && (class_at(k, p, end, &n) & bits))
        p += n;
    return p;
}

/* End of the run of characters that have none of the bits. */
static inline const uint8_t *run_without(const uint8_t *k, const uint8_t *p, const uint8_t *end, unsigned bits)
{
    size_t n;
    while (p < end && !(class_at(k, p, end, &n) & bits))
        p += n;
    return p;
}

static inline const uint8_t *newlines(const uint8_t *p, const uint8_t *end, bool slash)
{
    while (p < end && (*p == '\r' || *p == '\n' || (slash && *p == '/')))
        p++;
    return p;
}

/* 's|'t|'re|'ve|'m|'ll|'d at the apostrophe p. Without case, s is also U+017F, the long s. */
static inline size_t contraction(const uint8_t *p, const uint8_t *end, bool any_case)
{
    if (end - p < 2 || *p != '\'')
        return 0;
    uint8_t a = p[1], b = end - p > 2 ? p[2] : 0;
    if (any_case) {
        if (a == 0xC5 && b == 0xBF)
            return 3;
        a = a >= 'A' && a <= 'Z' ? (uint8_t)(a + 32) : a;
        b = b >= 'A' && b <= 'Z' ? (uint8_t)(b + 32) : b;
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/* \s+(?!\S)|\s+ at white space: all of it at the end of the text, else all but the last character
 * if there are two. */
static inline size_t plain_spaces(const uint8_t *p, const uint8_t *stop, const uint8_t *end)
{
    const uint8_t *last = stop;
    if (stop == end)
        return (size_t)(stop - p);
    do {
        last--;
    } while ((*last & 0xC0) == 0x80);
    return (size_t)((last > p ? last : stop) - p);
}

/* \s*[\r\n]+|\s+(?!\S)|\s+: with a newline in the run, up to the last one. at_end: \s++$ comes
 * before them. */
static inline size_t spaces(const uint8_t *k, const uint8_t *p, const uint8_t *end, bool at_end)
{
    const uint8_t *stop = run_of(k, p, end, CH_SPACE), *q = stop;
    if (at_end && stop == end)
        return (size_t)(stop - p);
    while (q > p && q[-1] != '\n' && q[-1] != '\r')
        q--;
    return q > p ? (size_t)(q - p) : plain_spaces(p, stop, end);
}

static inline size_t digits(const uint8_t *k, const uint8_t *p, const uint8_t *end, int most)
{
    const uint8_t *q = p;
    size_t n;
    for (int i = 0; i < most && (class_at(k, q, end, &n) & CH_NUMBER); i++)
        q += n;
    return (size_t)(q - p);
}

static size_t match_gpt2(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    size_t n, short_form = contraction(p, end, false);
    if (short_form > 0)
        return short_form;
    const uint8_t *q = p + (*p == ' ');
    uint8_t c = class_at(k, q, end, &n);
    if (n > 0 && !(c & CH_SPACE)) { /* ` ?\p{L}+`, ` ?\p{N}+`, ` ?[^\s\p{L}\p{N}]+` */
        unsigned kind = c & (CH_LETTER | CH_NUMBER);
        q = kind != 0 ? run_of(k, q, end, kind) : run_without(k, q, end, CH_SPACE | CH_LETTER | CH_NUMBER);
        return (size_t)(q - p);
    }
    return plain_spaces(p, run_of(k, p, end, CH_SPACE), end);
}

/* The family of cl100k: contractions, an optional sign before a word, few digits, signs with
 * newlines. */
static inline size_t match_words(const uint8_t *k, const uint8_t *p, const uint8_t *end, int most_digits, bool marks,
                                 bool at_end)
{
    const unsigned word = CH_LETTER | (marks ? CH_MARK : 0);
    size_t n, n2;
    uint8_t c = class_at(k, p, end, &n);
    if (c & word)
        return (size_t)(run_of(k, p + n, end, word) - p);
    if (*p == '\'') {
        size_t short_form = contraction(p, end, true);
        if (short_form > 0)
            return short_form;
    }
    if (c & CH_NUMBER)
        return digits(k, p, end, most_digits);
    if (!(c & CH_NEWLINE) && (class_at(k, p + n, end, &n2) & word)) /* `[^\r\n\p{L}\p{N}]?\p{L}+` */
        return (size_t)(run_of(k, p + n + n2, end, word) - p);
    const uint8_t *q = p + (*p == ' '), *stop; /* ` ?[^\s\p{L}\p{N}]+[\r\n]*` */
    stop = run_without(k, q, end, CH_SPACE | CH_NUMBER | word);
    if (stop > q)
        return (size_t)(newlines(stop, end, false) - p);
    return spaces(k, p, end, at_end);
}

static size_t match_llama3(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_words(k, p, end, 3, false, false);
}
static size_t match_cl100k(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_words(k, p, end, 3, false, true);
}
static size_t match_nanochat(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_words(k, p, end, 2, false, false);
}
static size_t match_qwen2(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_words(k, p, end, 1, false, false);
}
static size_t match_qwen35(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_words(k, p, end, 1, true, false);
}

static inline bool is_upper(uint8_t c)
{
    return (c & (CH_LETTER | CH_MARK)) && !(c & CH_LOWER);
} /* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] */
static inline bool is_lower(uint8_t c)
{
    return (c & (CH_LETTER | CH_MARK)) && !(c & CH_UPPER);
} /* [\p{Ll}\p{Lm}\p{Lo}\p{M}] */

/* upper*lower+ at p: where it ends, NULL: no match. A greedy upper* may have to give characters
 * back, as letters without case and marks are of both kinds: then the match ends after the last
 * such character. */
static inline const uint8_t *mixed_word(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *both = NULL;
    size_t n;
    uint8_t c;
    while (is_upper(c = class_at(k, p, end, &n))) {
        p += n;
        if (is_lower(c))
            both = p;
    }
    if (!is_lower(c))
        return both;
    while (is_lower(class_at(k, p, end, &n)))
        p += n;
    return p;
}

/* upper+lower* at p. */
static inline const uint8_t *upper_word(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p;
    size_t n;
    while (is_upper(class_at(k, q, end, &n)))
        q += n;
    if (q == p)
        return NULL;
    while (is_lower(class_at(k, q, end, &n)))
        q += n;
    return q;
}

/* The family of o200k: words are cut where capital letters begin. */
static inline size_t match_cased(const uint8_t *k, const uint8_t *p, const uint8_t *end, int most_digits, bool shorts)
{
    size_t n;
    uint8_t c = class_at(k, p, end, &n);
    bool sign = !(c & (CH_LETTER | CH_NUMBER | CH_NEWLINE)); /* may stand before a word */
    const uint8_t *stop = sign ? mixed_word(k, p + n, end) : NULL;
    if (stop == NULL)
        stop = mixed_word(k, p, end);
    if (stop == NULL && sign)
        stop = upper_word(k, p + n, end);
    if (stop == NULL)
        stop = upper_word(k, p, end);
    if (stop != NULL)
        return (size_t)(stop - p) + (shorts ? contraction(stop, end, true) : 0);
    if (c & CH_NUMBER)
        return digits(k, p, end, most_digits);
    const uint8_t *q = p + (*p == ' '); /* ` ?[^\s\p{L}\p{N}]+[\r\n/]*` */
    stop = run_without(k, q, end, CH_SPACE | CH_NUMBER | CH_LETTER);
    if (stop > q)
        return (size_t)(newlines(stop, end, true) - p);
    return spaces(k, p, end, false);
}

static size_t match_o200k(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_cased(k, p, end, 3, true);
}
static size_t match_tekken(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    return match_cased(k, p, end, 1, false);
}

static size_t match_digits3(const uint8_t *k, const uint8_t *p, const uint8_t *end) { return digits(k, p, end, 3); }
static size_t match_digit(const uint8_t *k, const uint8_t *p, const uint8_t *end) { return digits(k, p, end, 1); }

static size_t match_cjk(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    (void)k;
    const uint8_t *q = p;
    while (q < end && *q >= 0xE3 && *q <= 0xE9) {
        size_t n;
        uint32_t c = utf8_at(q, &n);
        if (!((c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF)))
            break;
        q += n;
    }
    return (size_t)(q - p);
}

static inline bool is_latin(uint8_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* The third split of DeepSeek V3. What no alternative matches (control characters) is a gap. */
static size_t match_deepseek3(const uint8_t *k, const uint8_t *p, const uint8_t *end)
{
    const unsigned word = CH_LETTER | CH_MARK;
    const uint8_t *q = p + 1;
    size_t n, n2;
    uint8_t c = class_at(k, p, end, &n);
    if (*p < 0x80 && (c & CH_SIGN) && q < end && is_latin(*q)) { /* ASCII sign, ASCII letters */
        while (q < end && is_latin(*q))
            q++;
        return (size_t)(q - p);
    }
    if (c & word)
        return (size_t)(run_of(k, p, end, word) - p);
    if (!(c & (CH_NEWLINE | CH_SIGN)) && (class_at(k, p + n, end, &n2) & word))
        return (size_t)(run_of(k, p + n, end, word) - p);
    const uint8_t *signs = p + (*p == ' '), *stop = run_of(k, signs, end, CH_SIGN);
    if (stop > signs)
        return (size_t)(newlines(stop, end, false) - p);
    return c & CH_SPACE ? spaces(k, p, end, false) : 0;
}

#define SHORTS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define BEFORE "[^\\r\\n\\p{L}\\p{N}]?"
#define ENDING "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Entries that share a function are other spellings with the same pieces; the first one's name is
 * shown. */
static const struct split_known table[] = {
    {"gpt2", "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", match_gpt2, NULL},
    {"r50k", "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s", match_gpt2,
     NULL},
    {"llama3", SHORTS "|" BEFORE "\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" ENDING, match_llama3, NULL},
    {"cl100k",
     "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+| "
     "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s",
     match_cl100k,
     "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s"},
    {"nanochat",
     "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,2}| "
     "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     match_nanochat, NULL},
    {"qwen2", SHORTS "|" BEFORE "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" ENDING, match_qwen2, NULL},
    {"qwen35", SHORTS "|" BEFORE "[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" ENDING, match_qwen35,
     NULL},
    {"o200k",
     BEFORE UPPER "*" LOWER "+" SHORTS "?|" BEFORE UPPER "+" LOWER "*" SHORTS
                  "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" ENDING,
     match_o200k, NULL},
    {"tekken", BEFORE UPPER "*" LOWER "+|" BEFORE UPPER "+" LOWER "*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" ENDING,
     match_tekken, NULL},
    {"digits3", "\\p{N}{1,3}", match_digits3, NULL},
    {"digit", "\\p{N}", match_digit, NULL},
    {"cjk", "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+", match_cjk, NULL},
    {"deepseek3",
     "[!\"#$%&'()*+,\\-./"
     ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
     " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
     match_deepseek3, NULL},
};

const struct split_known *split_table(int *n)
{
    *n = countof(table);
    return table;
}

const struct split_known *split_find_pattern(const char *regex)
{
    for (int i = 0; i < countof(table); i++)
        if (strcmp(table[i].pattern, regex) == 0 || (table[i].in_json != NULL && strcmp(table[i].in_json, regex) == 0))
            return &table[i];
    return NULL;
}

bool split_reads_otherwise(const char *regex)
{
    for (const char *p = regex; (p = strstr(p, "}+")) != NULL; p += 2) {
        const char *open = p;
        while (open > regex && strchr("0123456789,", open[-1]) != NULL)
            open--;
        bool counts = p > open && open > regex + 1 && open[-1] == '{';
        if (counts && open[-2] != 'x') /* not \x{41} */
            return true;
    }
    return false;
}

const struct split_known *split_find_name(const char *name)
{
    for (int i = 0; i < countof(table); i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}
