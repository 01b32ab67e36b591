/* Events of a trace's text as columns, without a Python object for each.
 *
 * Only what is regular becomes a row: strict JSON, texts of plain ASCII without escapes, whole numbers of 64 bits where
 * the column is of whole numbers, no key twice. An event that is anything else is left to Python: its place in the text
 * is returned, and the callers decode it as they always did. A piece of text in which even the ends of events are in
 * doubt is left to Python as a whole. So this file decides how fast a trace is read, never what is read.
 *
 * The text comes from strangers. Every read is checked against the end of the text, nothing recurses, and memory grows
 * with the text only. The GIL is released while text is scanned. What is scanned for (keys, categories, tables) is
 * handed over by `__init__.py` beside this file, which also explains the columns.
 */
#ifndef STEPSCOPE_SCANNER_H
#define STEPSCOPE_SCANNER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "texts.h"

enum { MOST_KEYS = 64, MOST_TABLES = 12, MOST_COLUMNS = 24, MOST_CATEGORIES = 64, NUM_LETTERS = 128, MOST_THREAD = 200 };
enum { KEY_SLOTS = 128 };

/* What a column takes from an event; the same numbers as in __init__.py. */
enum { EVENT, KIND, NAME, THREAD, START, DURATION, INTEGER, FLOAT, TEXT, RAW };
/* Where an integer comes from if its argument is missing: another argument, or one of these. */
enum { NOWHERE = -1, PROCESS = -2, THREAD_OR_STREAM = -3 };

typedef struct {
    int type, argument, otherwise;
    void *cells; /* of 4 or 8 bytes */
    uint8_t *is_valid; /* a bit for each row */
    size_t num_valid;
} Column;

typedef struct {
    int num_columns;
    Column columns[MOST_COLUMNS];
    size_t num_rows, room;
} Table;

typedef struct {
    char name[64];
    size_t length;
    bool is_raw; /* any JSON value, kept as written; other arguments are numbers or texts */
} Key;

typedef struct {
    int table;
    uint32_t kind;
    uint64_t carried; /* the arguments that such events have, by bit */
} Place;

/* One event, taken apart. */
typedef struct {
    Token letter, category, name, process, thread, start, duration;
    bool has_args;
    uint64_t has; /* which of the arguments are there */
    Token arguments[MOST_KEYS];
    uint32_t position;
} Event;

typedef struct {
    uint64_t cells[MOST_COLUMNS];
    uint32_t is_valid;
} Row;

typedef struct {
    size_t event, begin, end;
} Span;

typedef struct {
    Span *spans;
    size_t num, room;
} Spans;

typedef struct {
    uint32_t kept, other;
} Count;

/* What a piece that is undone goes back to. */
typedef struct {
    size_t num_rows[MOST_TABLES];
    uint32_t num_threads, num_events;
    Count counts[MOST_CATEGORIES][NUM_LETTERS];
} Mark;

typedef struct {
    int num_keys, num_tables, num_places, memory_table, collectives_table, collective_key;
    Key keys[MOST_KEYS];
    int8_t key_slots[KEY_SLOTS]; /* the first key of each hash, and after it the next */
    int8_t next_key[MOST_KEYS];
    Table tables[MOST_TABLES];
    Place places[MOST_CATEGORIES]; /* by the code of a known category's name in `known`; the last is for the others */
    Texts known, categories, texts, raws, threads;
    Place place_of[MOST_CATEGORIES]; /* by the code of a category as written in `categories` */
    Count counts[MOST_CATEGORIES][NUM_LETTERS];
    uint32_t num_events;
    Mark mark;
    Event event;
    Row rows[2];
    Spans pieces, odd; /* pieces scanned: first event, begin, end; events left to Python: position, begin, end */
    bool is_busy, is_short_of_memory;
} Scanner;

/* -- Rows ----------------------------------------------------------------------------------------------------------- */

static inline size_t cell_bytes(int type) {
    return type == START || type == DURATION || type == INTEGER || type == FLOAT ? 8 : 4;
}

static bool has_room(Scanner *scanner, Table *table) {
    if (table->num_rows < table->room)
        return true;
    size_t room = table->room ? 2 * table->room : 1024;
    for (int i = 0; i < table->num_columns; i++) {
        Column *column = &table->columns[i];
        void *cells = realloc(column->cells, room * cell_bytes(column->type));
        if (cells)
            column->cells = cells;
        uint8_t *bits = realloc(column->is_valid, room / 8);
        if (bits)
            column->is_valid = bits;
        if (!cells || !bits) {
            scanner->is_short_of_memory = true;
            return false;
        }
        memset(bits + table->room / 8, 0, (room - table->room) / 8);
    }
    table->room = room;
    return true;
}

static bool whole_number(const Token *token, size_t num_skipped, int64_t *number) {
    if (token->type == INTEGER_TOKEN) {
        *number = token->integer;
        return true;
    }
    /* Some producers write numbers as text. */
    size_t length = token->length - num_skipped;
    if (token->type != TEXT_TOKEN || length < 1 || length > 18)
        return false;
    int64_t value = 0;
    for (size_t i = num_skipped; i < token->length; i++) {
        if (token->text[i] < '0' || token->text[i] > '9')
            return false;
        value = 10 * value + (token->text[i] - '0');
    }
    *number = value;
    return true;
}

static uint32_t thread_code(Scanner *scanner, const Event *event) {
    uint8_t both[MOST_THREAD];
    const Token *parts[2] = {&event->process, &event->thread};
    size_t length = 0;
    for (int i = 0; i < 2; i++) {
        const Token *part = parts[i];
        if (part->length + 3 > MOST_THREAD - length)
            return NO_CODE;
        if (part->type == TEXT_TOKEN)
            both[length++] = '"';
        if (part->type != MISSING)
            memcpy(both + length, part->text, part->length), length += part->length;
        both[length++] = 0; /* never in a text, so the parts stay apart */
    }
    return code_of(&scanner->threads, both, length);
}

/* Puts one value of the event into a row; false if it is not regular. */
static bool fill_cell(Scanner *scanner, const Column *column, const Place *place, Row *row, int i) {
    const Event *event = &scanner->event;
    int64_t number = 0;
    uint32_t code = 0;
    bool is_carried = column->argument >= 0 && (place->carried >> column->argument & 1);
    const Token *token = is_carried && (event->has >> column->argument & 1) ? &event->arguments[column->argument] : NULL;
    switch (column->type) {
    case EVENT:
        code = event->position;
        break;
    case KIND:
        code = place->kind;
        break;
    case NAME:
        if (event->name.type != MISSING)
            code = code_of(&scanner->texts, event->name.text, event->name.length);
        break;
    case THREAD:
        code = thread_code(scanner, event);
        break;
    case START:
        if (!nanoseconds(&event->start, &number))
            return false;
        break;
    case DURATION:
        if (event->duration.type != MISSING && !nanoseconds(&event->duration, &number))
            return false;
        break;
    case TEXT:
        if (!token)
            return true; /* null */
        if (token->type != TEXT_TOKEN)
            return false;
        code = code_of(&scanner->texts, token->text, token->length);
        break;
    case RAW:
        if (!token)
            return true;
        if (token->type == TEXT_TOKEN) /* with its quotes */
            code = code_of(&scanner->raws, token->text - 1, token->length + 2);
        else
            code = code_of(&scanner->raws, token->text, token->length);
        break;
    case FLOAT:
        if (!token)
            return true;
        double value;
        if (!floating(token, &value))
            return false;
        memcpy(&number, &value, sizeof number);
        break;
    default: { /* INTEGER */
        size_t num_skipped = 0;
        if (!token && is_carried && column->otherwise >= 0 && (event->has >> column->otherwise & 1))
            token = &event->arguments[column->otherwise];
        if (!token && is_carried && column->otherwise == PROCESS)
            token = &event->process;
        if (!token && is_carried && column->otherwise == THREAD_OR_STREAM) {
            token = &event->thread;
            if (token->type == TEXT_TOKEN && token->length > 7 && !memcmp(token->text, "stream ", 7))
                num_skipped = 7;
        }
        if (!token || token->type == MISSING)
            return true;
        if (!whole_number(token, num_skipped, &number))
            return false;
    }
    }
    if (code == NO_CODE)
        return false;
    row->cells[i] = cell_bytes(column->type) == 4 ? code : (uint64_t)number;
    row->is_valid |= UINT32_C(1) << i;
    return true;
}

static bool fill_row(Scanner *scanner, const Table *table, const Place *place, Row *row) {
    memset(row, 0, sizeof *row);
    uint64_t there = scanner->event.has & place->carried;
    for (int i = 0; i < table->num_columns; i++) {
        const Column *column = &table->columns[i];
        bool is_null = column->argument >= 0 && column->otherwise == NOWHERE && !(there >> column->argument & 1);
        if (!is_null && !fill_cell(scanner, column, place, row, i))
            return false;
    }
    return true;
}

static void keep_row(Table *table, const Row *row) {
    size_t at = table->num_rows++;
    for (int i = 0; i < table->num_columns; i++) {
        Column *column = &table->columns[i];
        bool is_valid = row->is_valid >> i & 1;
        if (cell_bytes(column->type) == 4)
            ((uint32_t *)column->cells)[at] = (uint32_t)row->cells[i];
        else
            ((uint64_t *)column->cells)[at] = row->cells[i];
        column->is_valid[at / 8] = (uint8_t)((column->is_valid[at / 8] & ~(1u << at % 8)) | (unsigned)is_valid << at % 8);
        column->num_valid += is_valid; /* counted again when a piece is undone */
    }
}

/* -- Events --------------------------------------------------------------------------------------------------------- */

static inline unsigned key_hash(const uint8_t *text, size_t length) {
    return (unsigned)(length * 31 + text[0] * 7u + text[length - 1] * 3u + text[length / 2]) % KEY_SLOTS;
}

static inline int key_of(const Scanner *scanner, const Token *name) {
    if (name->length == 0)
        return -1;
    int key = scanner->key_slots[key_hash(name->text, name->length)];
    while (key >= 0 &&
           (scanner->keys[key].length != name->length || memcmp(scanner->keys[key].name, name->text, name->length)))
        key = scanner->next_key[key];
    return key;
}

/* After a value: true with the cursor at the next name, or with `is_end` after the closing bracket. */
static inline const uint8_t *after_value(const uint8_t *at, const uint8_t *end, bool *is_end) {
    at = blank(at, end);
    if (at == end || (*at != ',' && *at != '}'))
        return NULL;
    *is_end = *at == '}';
    return *is_end ? at + 1 : blank(at + 1, end);
}

static const uint8_t *scan_args(Scanner *scanner, const uint8_t *at, const uint8_t *end) {
    Event *event = &scanner->event;
    Token name, ignored;
    at = blank(at, end);
    if (at < end && *at == '}')
        return at + 1;
    for (bool is_end = false; !is_end;) {
        if (!(at = scan_name(at, end, &name)))
            return NULL;
        int key = key_of(scanner, &name);
        if (key < 0) {
            if (!(at = scan_value(at, end, &ignored)))
                return NULL;
        } else {
            Token *value = &event->arguments[key];
            if (event->has >> key & 1 || !(at = scan_value(at, end, value)))
                return NULL;
            bool is_raw = scanner->keys[key].is_raw;
            if (!is_raw && (value->type == NESTED_TOKEN || (value->type == DECIMAL_TOKEN && !is_plain(value))))
                return NULL;
            if (is_raw || value->type != NULL_TOKEN)
                event->has |= UINT64_C(1) << key;
        }
        if (!(at = after_value(at, end, &is_end)))
            return NULL;
    }
    return at;
}

static Token *part_of(Event *event, const Token *name) {
    const char *text = (const char *)name->text;
    switch (name->length) {
    case 2:
        return !memcmp(text, "ph", 2) ? &event->letter : !memcmp(text, "ts", 2) ? &event->start : NULL;
    case 3:
        return !memcmp(text, "cat", 3)   ? &event->category
               : !memcmp(text, "pid", 3) ? &event->process
               : !memcmp(text, "tid", 3) ? &event->thread
               : !memcmp(text, "dur", 3) ? &event->duration
                                         : NULL;
    case 4:
        return !memcmp(text, "name", 4) ? &event->name : NULL;
    }
    return NULL;
}

static bool is_text(const Token *token) { return token->type == TEXT_TOKEN; }

static bool is_id(const Token *token) {
    return token->type == TEXT_TOKEN || token->type == INTEGER_TOKEN || token->type == MISSING;
}

/* Takes the event at the cursor apart; NULL if it is not regular. */
static const uint8_t *scan_parts(Scanner *scanner, const uint8_t *at, const uint8_t *end) {
    Event *event = &scanner->event;
    Token name, ignored, *parts[] = {&event->letter,  &event->category, &event->name, &event->process,
                                   &event->thread, &event->start,    &event->duration};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        parts[i]->type = MISSING, parts[i]->length = 0;
    event->has = 0;
    event->has_args = false;
    at = blank(at + 1, end);
    for (bool is_end = false; !is_end;) {
        if (!(at = scan_name(at, end, &name)))
            return NULL;
        if (name.length == 4 && !memcmp(name.text, "args", 4)) {
            at = blank(at, end);
            if (event->has_args || at == end || *at != '{' || !(at = scan_args(scanner, at + 1, end)))
                return NULL;
            event->has_args = true;
        } else {
            Token *part = part_of(event, &name);
            if ((part && part->type != MISSING) || !(at = scan_value(at, end, part ? part : &ignored)))
                return NULL;
        }
        if (!(at = after_value(at, end, &is_end)))
            return NULL;
    }
    if (!is_text(&event->letter) || event->letter.length != 1 || !(is_text(&event->name) || event->name.type == MISSING) ||
        !(is_text(&event->category) || event->category.type == MISSING) || !is_id(&event->process) ||
        !is_id(&event->thread))
        return NULL;
    return at;
}

static uint32_t category_code(Scanner *scanner, const Token *category) {
    uint32_t before = scanner->categories.num;
    if (category->type == MISSING)
        return 0; /* like an empty one */
    if (before >= MOST_CATEGORIES && !is_known(&scanner->categories, category->text, category->length))
        return NO_CODE;
    uint32_t code = code_of(&scanner->categories, category->text, category->length);
    if (code != NO_CODE && code >= before) {
        uint8_t lower[64];
        uint32_t known = NO_CODE;
        if (category->length <= sizeof lower) {
            for (size_t i = 0; i < category->length; i++) {
                uint8_t letter = category->text[i];
                lower[i] = letter >= 'A' && letter <= 'Z' ? letter + 32 : letter;
            }
            if (is_known(&scanner->known, lower, category->length))
                known = code_of(&scanner->known, lower, category->length);
        }
        scanner->place_of[code] = scanner->places[known == NO_CODE ? 0 : known];
    }
    return code;
}

/* Keeps the event that was taken apart in its tables and counts; false if it is not regular after all. */
static bool keep_event(Scanner *scanner) {
    static const char memory[] = "[memory]";
    Event *event = &scanner->event;
    uint8_t letter = event->letter.text[0];
    if (letter == 'M' || letter == 'B' || letter == 'E')
        return false;
    uint32_t category = category_code(scanner, &event->category);
    if (category == NO_CODE)
        return false;
    Count *count = &scanner->counts[category][letter];
    Table *first = NULL, *second = NULL;
    Place everything = {0, 0, ~UINT64_C(0)};
    const Place *place = &everything;
    event->position = scanner->num_events;
    if (letter == 'X') {
        place = &scanner->place_of[category];
        first = &scanner->tables[place->table];
        if (event->has >> scanner->collective_key & 1)
            second = &scanner->tables[scanner->collectives_table];
    } else if ((letter == 'i' || letter == 'I') && event->name.length == sizeof memory - 1 &&
               !memcmp(event->name.text, memory, sizeof memory - 1))
        first = &scanner->tables[scanner->memory_table];
    if ((first && (!fill_row(scanner, first, place, &scanner->rows[0]) || !has_room(scanner, first))) ||
        (second && (!fill_row(scanner, second, &everything, &scanner->rows[1]) || !has_room(scanner, second))))
        return false;
    if (first)
        keep_row(first, &scanner->rows[0]);
    if (second)
        keep_row(second, &scanner->rows[1]);
    if (first)
        count->kept++;
    else
        count->other++;
    return true;
}

/* -- Pieces --------------------------------------------------------------------------------------------------------- */

static bool add_span(Scanner *scanner, Spans *spans, size_t event, size_t begin, size_t end) {
    if (spans->num == spans->room) {
        size_t room = spans->room ? 2 * spans->room : 64;
        Span *larger = realloc(spans->spans, room * sizeof *larger);
        if (!larger) {
            scanner->is_short_of_memory = true;
            return false;
        }
        spans->spans = larger;
        spans->room = room;
    }
    spans->spans[spans->num++] = (Span){event, begin, end};
    return true;
}

static void set_mark(Scanner *scanner) {
    Mark *mark = &scanner->mark;
    for (int i = 0; i < scanner->num_tables; i++)
        mark->num_rows[i] = scanner->tables[i].num_rows;
    mark->num_threads = scanner->threads.num;
    mark->num_events = scanner->num_events;
    memcpy(mark->counts, scanner->counts, sizeof(Count) * NUM_LETTERS * scanner->categories.num);
    memset(mark->counts + scanner->categories.num, 0, sizeof(Count) * NUM_LETTERS * (MOST_CATEGORIES - scanner->categories.num));
}

static void go_back(Scanner *scanner) {
    const Mark *mark = &scanner->mark;
    for (int i = 0; i < scanner->num_tables; i++) {
        Table *table = &scanner->tables[i];
        for (int j = 0; j < table->num_columns; j++)
            for (size_t row = mark->num_rows[i]; row < table->num_rows; row++)
                table->columns[j].num_valid -= table->columns[j].is_valid[row / 8] >> row % 8 & 1;
        table->num_rows = mark->num_rows[i];
    }
    forget_after(&scanner->threads, mark->num_threads); /* a thread without events is no thread of the trace */
    scanner->num_events = mark->num_events;
    memcpy(scanner->counts, mark->counts, sizeof mark->counts);
}

/* Scans events with commas between them from one end of the text to the other; false if it is not that. */
static bool scan_piece(Scanner *scanner, const uint8_t *text, const uint8_t *at, const uint8_t *end) {
    for (at = blank(at, end);; at = blank(at + 1, end)) {
        if (at == end || *at != '{')
            return false;
        const uint8_t *begin = at;
        at = scan_parts(scanner, begin, end);
        if (!at || !keep_event(scanner)) {
            at = after_brackets(begin, end);
            if (!at || scanner->is_short_of_memory ||
                !add_span(scanner, &scanner->odd, scanner->num_events, (size_t)(begin - text), (size_t)(at - text)))
                return false;
        }
        scanner->num_events++;
        at = blank(at, end);
        if (at == end)
            return true;
        if (*at != ',')
            return false;
    }
}

/* Where the next piece begins and this one ends: at a comma between what seem to be two events. */
static void find_end(const uint8_t *text, size_t from, size_t length, size_t size, size_t *end, size_t *next) {
    const uint8_t *stop = text + size, *at = text + (from < size ? from : size);
    *end = length, *next = size;
    while (at < stop && (at = memchr(at, '}', (size_t)(stop - at)))) {
        const uint8_t *comma = blank(++at, stop);
        if (comma == stop || *comma != ',')
            continue;
        const uint8_t *brace = blank(comma + 1, stop);
        if (brace < stop && *brace == '{') {
            *end = (size_t)(at - text), *next = (size_t)(brace - text);
            return;
        }
    }
}

/* Scans piece after piece up to one with events that are left to Python, or one that is left to it as a whole. */
static size_t scan_pieces(Scanner *scanner, const uint8_t *text, size_t size, size_t at, size_t length, size_t piece,
                          size_t largest, bool *is_left) {
    *is_left = false;
    scanner->pieces.num = scanner->odd.num = 0;
    while (at < length && !scanner->odd.num) {
        size_t end, next;
        find_end(text, at + piece, length, size, &end, &next);
        set_mark(scanner);
        *is_left = end - at > largest || scanner->num_events > UINT32_MAX - (end - at) ||
                   !scan_piece(scanner, text, text + at, text + end) ||
                   !add_span(scanner, &scanner->pieces, scanner->mark.num_events, at, end);
        if (*is_left) {
            go_back(scanner);
            scanner->odd.num = 0;
            break;
        }
        at = next;
    }
    return at;
}

#endif
