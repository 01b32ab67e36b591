/* The values of strict JSON, of texts in ASCII without escapes. Anything else is NULL: Python looks at it. */
#ifndef STEPSCOPE_JSON_H
#define STEPSCOPE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MISSING, NULL_TOKEN, BOOL_TOKEN, INTEGER_TOKEN, DECIMAL_TOKEN, TEXT_TOKEN, NESTED_TOKEN };
enum { MOST_DEPTH = 63, MOST_DIGITS = 300, EXACT_DIGITS = 18 };

typedef struct {
    const uint8_t *text; /* as written; of a text what is between its quotes */
    size_t length;
    int64_t integer; /* the digits of a number that has few enough and no exponent */
    int num_decimals; /* how many of them are after the point; -1 for other numbers */
    int type;
} Token;

static inline const uint8_t *blank(const uint8_t *at, const uint8_t *end) {
    while (at < end && *at <= ' ' && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

static inline bool is_digit(const uint8_t *at, const uint8_t *end) { return at < end && *at >= '0' && *at <= '9'; }

/* From after a quote to the quote that ends the text. */
static inline const uint8_t *end_of_text(const uint8_t *at, const uint8_t *end) {
    const uint64_t ones = UINT64_C(0x0101010101010101), high = ones << 7;
    while (end - at >= 8) { /* eight bytes at a time: no quote, backslash, control character, or byte above 127? */
        uint64_t word;
        memcpy(&word, at, 8);
        uint64_t quotes = word ^ ones * '"', slashes = word ^ ones * '\\';
        uint64_t found = ((quotes - ones) | (slashes - ones) | (word - ones * ' ') | word) & high;
        if (found) {
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            at += __builtin_ctzll(found) / 8; /* exact for the first, whatever it borrowed from those after it */
            return *at == '"' ? at : NULL;
#else
            break;
#endif
        }
        at += 8;
    }
    for (; at < end; at++) {
        if (*at == '"')
            return at;
        if (*at < ' ' || *at > 127 || *at == '\\')
            return NULL;
    }
    return NULL;
}

static inline const uint8_t *scan_text(const uint8_t *at, const uint8_t *end, Token *token) {
    const uint8_t *last = end_of_text(at + 1, end);
    if (!last)
        return NULL;
    token->type = TEXT_TOKEN;
    token->text = at + 1;
    token->length = (size_t)(last - at - 1);
    return last + 1;
}

/* A name and its colon. */
static inline const uint8_t *scan_name(const uint8_t *at, const uint8_t *end, Token *name) {
    if (at == end || *at != '"' || !(at = scan_text(at, end, name)))
        return NULL;
    at = blank(at, end);
    return at < end && *at == ':' ? at + 1 : NULL;
}

static inline const uint8_t *scan_number(const uint8_t *at, const uint8_t *end, Token *token) {
    const uint8_t *begin = at;
    bool is_negative = *at == '-', has_exponent = false;
    uint64_t digits = 0; /* may overflow if there are too many, and is not used then */
    at += is_negative;
    const uint8_t *first = at;
    if (!is_digit(at, end))
        return NULL;
    if (*at == '0')
        at++;
    else
        for (; is_digit(at, end); at++)
            digits = 10 * digits + (*at - '0');
    size_t num_digits = (size_t)(at - first), num_decimals = 0;
    bool is_whole = num_digits <= EXACT_DIGITS && !(is_negative && !digits); /* -0 may be meant as a float */
    if (at < end && *at == '.') {
        is_whole = false;
        if (!is_digit(++at, end))
            return NULL;
        for (first = at; is_digit(at, end); at++)
            digits = 10 * digits + (*at - '0');
        num_decimals = (size_t)(at - first);
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        is_whole = false, has_exponent = true;
        at++;
        at += at < end && (*at == '+' || *at == '-');
        if (!is_digit(at, end))
            return NULL;
        while (is_digit(at, end))
            at++;
    }
    bool is_exact = num_digits + num_decimals <= EXACT_DIGITS && !has_exponent;
    token->type = is_whole ? INTEGER_TOKEN : DECIMAL_TOKEN;
    token->text = begin;
    token->length = (size_t)(at - begin);
    token->integer = is_exact ? (is_negative ? -(int64_t)digits : (int64_t)digits) : 0;
    token->num_decimals = is_exact ? (int)num_decimals : -1;
    return at;
}

static inline const uint8_t *scan_word(const uint8_t *at, const uint8_t *end, const char *word, int type, Token *token) {
    size_t length = strlen(word);
    if ((size_t)(end - at) < length || memcmp(at, word, length))
        return NULL;
    token->type = type;
    token->text = at;
    token->length = length;
    return at + length;
}

static inline const uint8_t *scan_scalar(const uint8_t *at, const uint8_t *end, Token *token) {
    switch (*at) {
    case '"':
        return scan_text(at, end, token);
    case 't':
        return scan_word(at, end, "true", BOOL_TOKEN, token);
    case 'f':
        return scan_word(at, end, "false", BOOL_TOKEN, token);
    case 'n':
        return scan_word(at, end, "null", NULL_TOKEN, token);
    default:
        return scan_number(at, end, token);
    }
}

/* A list or an object. */
static const uint8_t *scan_nested(const uint8_t *at, const uint8_t *end, Token *token) {
    const uint8_t *begin = at;
    uint64_t are_objects = 0; /* of the open brackets, the innermost in the lowest bit */
    int depth = 0;
    Token inside;
    for (;;) { /* at a value */
        if (at == end)
            return NULL;
        if (*at == '[' || *at == '{') {
            if (depth == MOST_DEPTH)
                return NULL;
            are_objects = are_objects << 1 | (*at == '{');
            depth++;
            at = blank(at + 1, end);
            if (at == end)
                return NULL;
            if (*at != (are_objects & 1 ? '}' : ']')) {
                if (are_objects & 1 && !(at = scan_name(at, end, &inside)))
                    return NULL;
                at = blank(at, end);
                continue;
            }
        } else {
            if (!(at = scan_scalar(at, end, &inside)))
                return NULL;
            at = blank(at, end);
        }
        while (at < end && *at == (are_objects & 1 ? '}' : ']')) {
            at++;
            are_objects >>= 1;
            if (--depth == 0) {
                token->type = NESTED_TOKEN;
                token->text = begin;
                token->length = (size_t)(at - begin);
                return at;
            }
            at = blank(at, end);
        }
        if (at == end || *at != ',')
            return NULL;
        at = blank(at + 1, end);
        if (are_objects & 1) {
            if (!(at = scan_name(at, end, &inside)))
                return NULL;
            at = blank(at, end);
        }
    }
}

static inline const uint8_t *scan_value(const uint8_t *at, const uint8_t *end, Token *token) {
    at = blank(at, end);
    if (at == end)
        return NULL;
    return *at == '[' || *at == '{' ? scan_nested(at, end, token) : scan_scalar(at, end, token);
}

/* Where the brackets that open here are closed, whatever is between them; texts may have escapes and any bytes. */
static const uint8_t *after_brackets(const uint8_t *at, const uint8_t *end) {
    size_t depth = 0;
    for (bool is_in_text = false; at < end; at++) {
        if (is_in_text && *at == '\\') {
            if (++at == end) /* whatever is escaped */
                return NULL;
        } else if (*at == '"')
            is_in_text = !is_in_text;
        else if (is_in_text)
            continue;
        else if (*at == '{' || *at == '[')
            depth++;
        else if ((*at == '}' || *at == ']') && --depth == 0)
            return at + 1;
    }
    return NULL;
}

/* A number without exponent, and not endless: any decoder takes it. */
static inline bool is_plain(const Token *token) {
    return token->length < MOST_DIGITS && !memchr(token->text, 'e', token->length) &&
           !memchr(token->text, 'E', token->length);
}

/* Microseconds with at most three decimals, as nanoseconds. */
static inline bool nanoseconds(const Token *token, int64_t *number) {
    if (token->type != INTEGER_TOKEN && token->type != DECIMAL_TOKEN)
        return false;
    static const int64_t factors[] = {1000, 100, 10, 1};
    const int64_t most = INT64_MAX / 1000;
    if (token->num_decimals >= 0 && token->num_decimals <= 3 && token->integer <= most && token->integer >= -most) {
        *number = token->integer * factors[token->num_decimals];
        return true;
    }
    const uint8_t *at = token->text, *end = at + token->length;
    bool is_negative = *at == '-';
    int64_t value = 0;
    int num_decimals = 0;
    for (at += is_negative; is_digit(at, end); at++) {
        if (value > INT64_MAX / 10000 - 1)
            return false;
        value = 10 * value + (*at - '0');
    }
    if (at < end && *at == '.')
        for (at++; is_digit(at, end) && num_decimals < 3; at++, num_decimals++)
            value = 10 * value + (*at - '0');
    if (at != end)
        return false;
    for (; num_decimals < 3; num_decimals++)
        value *= 10;
    *number = is_negative ? -value : value;
    return true;
}

/* A number whose digits and power of ten are both exact in a float: so is their quotient, rounded once. */
static inline bool floating(const Token *token, double *number) {
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                    1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18};
    if (token->type != INTEGER_TOKEN && token->type != DECIMAL_TOKEN)
        return false;
    const int64_t most = INT64_C(1) << 53;
    if (token->num_decimals < 0 || token->integer > most || token->integer < -most)
        return false;
    *number = (double)token->integer / powers[token->num_decimals];
    return token->integer != 0 || *token->text != '-'; /* -0.0 */
}

#endif
