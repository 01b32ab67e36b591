/* `stepscope.trace.fast._scan`: the scanner of scanner.h for Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "arrow.h"
#include "nest.h"
#include "scanner.h"

enum { INTERFACE = 2 }; /* the same as in __init__.py; higher after a change of what they hand each other */
static const char NAME_OF_CAPSULE[] = "stepscope.trace.fast._scan";

static void free_scanner(PyObject *capsule) {
    Scanner *scanner = PyCapsule_GetPointer(capsule, NAME_OF_CAPSULE);
    if (!scanner)
        return;
    Texts *all[] = {&scanner->known, &scanner->categories, &scanner->texts, &scanner->raws, &scanner->threads};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free_texts(all[i]);
    for (int i = 0; i < scanner->num_tables; i++)
        for (int j = 0; j < scanner->tables[i].num_columns; j++) {
            free(scanner->tables[i].columns[j].cells);
            free(scanner->tables[i].columns[j].is_valid);
        }
    free(scanner->pieces.spans);
    free(scanner->odd.spans);
    free(scanner);
}

static Scanner *idle_scanner(PyObject *capsule) {
    Scanner *scanner = PyCapsule_GetPointer(capsule, NAME_OF_CAPSULE);
    if (scanner && scanner->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is scanning with this");
        return NULL;
    }
    return scanner;
}

/* -- What to scan for ------------------------------------------------------------------------------------------------ */

static bool take_keys(Scanner *scanner, PyObject *keys) {
    Py_ssize_t num = PyTuple_Size(keys);
    if (num < 0 || num > MOST_KEYS)
        return false;
    memset(scanner->key_slots, -1, sizeof scanner->key_slots);
    for (Py_ssize_t i = 0; i < num; i++) {
        Key *key = &scanner->keys[i];
        const char *name;
        Py_ssize_t length;
        int is_raw;
        if (!PyArg_ParseTuple(PyTuple_GetItem(keys, i), "y#p", &name, &length, &is_raw))
            return false;
        if (length < 1 || (size_t)length > sizeof key->name)
            return false;
        memcpy(key->name, name, (size_t)length);
        key->length = (size_t)length;
        key->is_raw = is_raw;
        unsigned hash = key_hash((const uint8_t *)key->name, key->length);
        scanner->next_key[i] = scanner->key_slots[hash];
        scanner->key_slots[hash] = (int8_t)i;
    }
    scanner->num_keys = (int)num;
    return true;
}

static bool take_tables(Scanner *scanner, PyObject *tables) {
    Py_ssize_t num = PyTuple_Size(tables);
    if (num < 0 || num > MOST_TABLES)
        return false;
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *columns = PyTuple_GetItem(tables, i);
        Py_ssize_t num_columns = PyTuple_Size(columns);
        if (num_columns < 0 || num_columns > MOST_COLUMNS)
            return false;
        for (Py_ssize_t j = 0; j < num_columns; j++) {
            Column *column = &scanner->tables[i].columns[j];
            PyObject *types = PyTuple_GetItem(columns, j);
            if (!PyArg_ParseTuple(types, "iii", &column->type, &column->argument, &column->otherwise))
                return false;
            if (column->type < EVENT || column->type > RAW || column->argument >= scanner->num_keys ||
                (column->type >= INTEGER && column->argument < 0) || column->otherwise >= scanner->num_keys)
                return false;
        }
        scanner->tables[i].num_columns = (int)num_columns;
    }
    scanner->num_tables = (int)num;
    return true;
}

static bool take_categories(Scanner *scanner, PyObject *categories) {
    Py_ssize_t num = PyTuple_Size(categories);
    if (num < 1 || num > MOST_CATEGORIES)
        return false;
    for (Py_ssize_t i = 0; i < num; i++) {
        const char *name;
        Py_ssize_t length;
        Place place;
        unsigned long long carried;
        unsigned int kind;
        if (!PyArg_ParseTuple(PyTuple_GetItem(categories, i), "y#iIK", &name, &length, &place.table, &kind, &carried))
            return false;
        if (place.table < 0 || place.table >= scanner->num_tables)
            return false;
        place.kind = kind, place.carried = carried;
        /* The first is empty and stands for all that are not known. */
        if (code_of(&scanner->known, (const uint8_t *)name, (size_t)length) != (uint32_t)i)
            return false;
        scanner->places[i] = place;
    }
    scanner->place_of[0] = scanner->places[0];
    return true;
}

static PyObject *new_scanner(PyObject *module, PyObject *arguments) {
    PyObject *keys, *tables, *categories;
    Scanner *scanner = calloc(1, sizeof *scanner);
    if (!scanner)
        return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(scanner, NAME_OF_CAPSULE, free_scanner);
    if (!capsule) {
        free(scanner);
        return NULL;
    }
    Texts *all[] = {&scanner->known, &scanner->categories, &scanner->texts, &scanner->raws, &scanner->threads};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (code_of(all[i], (const uint8_t *)"", 0)) {
            Py_DECREF(capsule);
            return PyErr_NoMemory();
        }
    if (PyArg_ParseTuple(arguments, "O!O!O!iii", &PyTuple_Type, &keys, &PyTuple_Type, &tables, &PyTuple_Type, &categories,
                         &scanner->memory_table, &scanner->collectives_table, &scanner->collective_key) &&
        take_keys(scanner, keys) && take_tables(scanner, tables) && take_categories(scanner, categories) &&
        scanner->memory_table >= 0 && scanner->memory_table < scanner->num_tables && scanner->collectives_table >= 0 &&
        scanner->collectives_table < scanner->num_tables && scanner->collective_key >= 0 &&
        scanner->collective_key < scanner->num_keys)
        return capsule;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "more, or other, than can be scanned for");
    Py_DECREF(capsule);
    return NULL;
}

/* -- Scanning -------------------------------------------------------------------------------------------------------- */

static PyObject *span_list(const Spans *spans) {
    PyObject *list = PyList_New((Py_ssize_t)spans->num);
    for (size_t i = 0; list && i < spans->num; i++) {
        const Span *span = &spans->spans[i];
        PyObject *item = Py_BuildValue("(nnn)", (Py_ssize_t)span->event, (Py_ssize_t)span->begin, (Py_ssize_t)span->end);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item)) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *scan(PyObject *module, PyObject *arguments) {
    PyObject *capsule;
    const char *text;
    Py_ssize_t size, at, length, piece, largest;
    unsigned int num_events;
    if (!PyArg_ParseTuple(arguments, "Oy#nnnnI", &capsule, &text, &size, &at, &length, &piece, &largest, &num_events))
        return NULL;
    Scanner *scanner = idle_scanner(capsule);
    if (!scanner)
        return NULL;
    if (at < 0 || length < at || length > size || piece < 0 || piece > size + (1 << 24) || largest < 0)
        return PyErr_Format(PyExc_ValueError, "not within the text");
    bool is_left;
    size_t end;
    scanner->num_events = num_events;
    scanner->is_busy = true;
    Py_BEGIN_ALLOW_THREADS
    end = scan_pieces(scanner, (const uint8_t *)text, (size_t)size, (size_t)at, (size_t)length, (size_t)piece,
                      (size_t)largest, &is_left);
    Py_END_ALLOW_THREADS
    scanner->is_busy = false;
    if (scanner->is_short_of_memory)
        return PyErr_NoMemory();
    PyObject *pieces = span_list(&scanner->pieces), *odd = span_list(&scanner->odd), *result = NULL;
    if (pieces && odd)
        result = Py_BuildValue("(nOIOO)", (Py_ssize_t)end, is_left ? Py_True : Py_False, scanner->num_events, pieces, odd);
    Py_XDECREF(pieces);
    Py_XDECREF(odd);
    return result;
}

static PyObject *undo(PyObject *module, PyObject *capsule) {
    Scanner *scanner = idle_scanner(capsule);
    if (!scanner)
        return NULL;
    go_back(scanner);
    Py_RETURN_NONE;
}

/* -- Results --------------------------------------------------------------------------------------------------------- */

static PyObject *column_of(Table *table, Column *column) {
    if (!column->num_valid)
        Py_RETURN_NONE;
    const char *format = cell_bytes(column->type) == 4 ? "I" : column->type == FLOAT ? "g" : "l";
    void *cells = column->cells;
    uint8_t *bits = column->is_valid;
    column->cells = NULL, column->is_valid = NULL;
    /* Without the room for more rows; if that fails it stays as it is. */
    void *less = realloc(cells, table->num_rows * cell_bytes(column->type));
    uint8_t *fewer = realloc(bits, (table->num_rows + 7) / 8);
    cells = less ? less : cells, bits = fewer ? fewer : bits;
    return as_arrow(format, table->num_rows, column->num_valid, bits, cells);
}

static PyObject *columns_of(Table *table) {
    PyObject *columns = PyList_New(table->num_columns);
    for (int i = 0; columns && i < table->num_columns; i++) {
        PyObject *column = column_of(table, &table->columns[i]);
        if (!column || PyList_SetItem(columns, i, column)) {
            Py_DECREF(columns);
            columns = NULL;
        }
    }
    table->num_rows = table->room = 0;
    for (int i = 0; i < table->num_columns; i++)
        table->columns[i].num_valid = 0;
    return columns;
}

static PyObject *text_list(const Texts *all, const char *format) {
    PyObject *list = PyList_New(all->num);
    for (uint32_t i = 0; list && i < all->num; i++) {
        const char *bytes = all->bytes ? (const char *)all->bytes + all->texts[i].begin : "";
        PyObject *item = Py_BuildValue(format, bytes, (Py_ssize_t)all->texts[i].length);
        if (!item || PyList_SetItem(list, i, item)) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *count_list(const Scanner *scanner) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < scanner->categories.num; i++)
        for (int letter = 0; list && letter < NUM_LETTERS; letter++) {
            const Count *count = &scanner->counts[i][letter];
            if (!count->kept && !count->other)
                continue;
            PyObject *item = Py_BuildValue("(CIiII)", letter, i, scanner->place_of[i].table, count->kept, count->other);
            if (!item || PyList_Append(list, item)) {
                Py_DECREF(list);
                list = NULL;
            }
            Py_XDECREF(item);
        }
    return list;
}

/* Returns everything scanned, and leaves the scanner without columns. */
static PyObject *finish(PyObject *module, PyObject *capsule) {
    Scanner *scanner = idle_scanner(capsule);
    if (!scanner)
        return NULL;
    memset(scanner->mark.num_rows, 0, sizeof scanner->mark.num_rows); /* nothing to undo any more */
    PyObject *tables = PyList_New(scanner->num_tables);
    for (int i = 0; tables && i < scanner->num_tables; i++) {
        PyObject *columns = columns_of(&scanner->tables[i]);
        if (!columns || PyList_SetItem(tables, i, columns)) {
            Py_DECREF(tables);
            return NULL;
        }
    }
    PyObject *parts[] = {tables,
                         text_list(&scanner->texts, "s#"),
                         text_list(&scanner->raws, "y#"),
                         text_list(&scanner->threads, "y#"),
                         text_list(&scanner->categories, "s#"),
                         count_list(scanner)};
    PyObject *result = NULL;
    if (parts[0] && parts[1] && parts[2] && parts[3] && parts[4] && parts[5])
        result = PyTuple_Pack(6, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_XDECREF(parts[i]);
    return result;
}

/* -- The tree of events ---------------------------------------------------------------------------------------------- */

/* Takes the first array of a stream, of `num` columns `thread`, `start`, `length` and `event`, without nulls. The stream has
 * no other: whoever calls has put chunks together. */
static bool take_rows(PyObject *capsule, int num, struct ArrowArray *array, Rows *rows) {
    static const char *const FORMATS[] = {"I", "l", "l", "I"};
    struct ArrowArrayStream *stream = PyCapsule_GetPointer(capsule, "arrow_array_stream");
    struct ArrowSchema schema;
    if (!stream)
        return false;
    bool is_right = stream->release && !stream->get_schema(stream, &schema);
    if (is_right) {
        is_right = !strcmp(schema.format, "+s") && schema.n_children == num;
        for (int i = 0; is_right && i < num; i++)
            is_right = !strcmp(schema.children[i]->format, FORMATS[i]);
        schema.release(&schema);
    }
    if (is_right && !stream->get_next(stream, array) && !array->release)
        return true; /* no rows */
    is_right = is_right && array->release && array->n_children == num && array->length < UINT32_MAX;
    const void *cells[4] = {NULL};
    for (int i = 0; is_right && i < num; i++) {
        const struct ArrowArray *child = array->children[i];
        is_right = child->length >= array->offset + array->length && !(child->null_count && child->buffers[0]);
        cells[i] = (const char *)child->buffers[1] + (child->offset + array->offset) * (FORMATS[i][0] == 'I' ? 4 : 8);
    }
    struct ArrowArray other = {0};
    if (is_right && (stream->get_next(stream, &other) || other.release)) {
        is_right = false;
        if (other.release)
            other.release(&other);
    }
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "not columns of numbers in one piece");
    else
        *rows = (Rows){.threads = cells[0], .starts = cells[1], .lengths = cells[2], .events = cells[3],
                       .num = (size_t)array->length};
    return is_right;
}

static PyObject *order_of_events(PyObject *module, PyObject *capsule) {
    struct ArrowArray array = {0};
    Rows rows = {0};
    PyObject *result = NULL;
    if (take_rows(capsule, 4, &array, &rows)) {
        uint32_t *order = malloc(rows.num * sizeof *order + 1), *room = malloc(rows.num / 2 * sizeof *room + 1);
        if (order && room) {
            Py_BEGIN_ALLOW_THREADS
            for (size_t i = 0; i < rows.num; i++)
                order[i] = (uint32_t)i;
            sort_rows(&rows, order, rows.num, room);
            Py_END_ALLOW_THREADS
            result = as_arrow("I", rows.num, rows.num, NULL, order);
        } else {
            PyErr_NoMemory();
            free(order);
        }
        free(room);
    }
    if (array.release)
        array.release(&array);
    return result;
}

static PyObject *nest_events(PyObject *module, PyObject *capsule) {
    struct ArrowArray array = {0};
    Rows rows = {0};
    Nest nest = {0};
    PyObject *parents = NULL, *own = NULL, *result = NULL;
    if (take_rows(capsule, 3, &array, &rows)) {
        bool is_done;
        Py_BEGIN_ALLOW_THREADS
        is_done = nest_rows(&nest, &rows);
        Py_END_ALLOW_THREADS
        if (is_done) {
            parents = as_arrow("I", rows.num, nest.num_parents, nest.has_parent, nest.parents);
            own = as_arrow("l", rows.num, rows.num, NULL, nest.own);
            nest.has_parent = NULL, nest.parents = NULL, nest.own = NULL;
            if (parents && own)
                result = PyTuple_Pack(2, parents, own);
        } else
            PyErr_NoMemory();
    }
    Py_XDECREF(parents);
    Py_XDECREF(own);
    free(nest.parents);
    free(nest.has_parent);
    free(nest.own);
    free(nest.stack.opens);
    if (array.release)
        array.release(&array);
    return result;
}

/* Gives memory that is free back to the system, where the C library keeps it. */
static PyObject *trim(PyObject *module, PyObject *nothing) {
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS
    malloc_trim(0);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"new", new_scanner, METH_VARARGS, "new(keys, tables, categories, memory table, collectives table, collective key)"},
    {"scan", scan, METH_VARARGS,
     "scan(scanner, text, at, length, piece, largest, num_events) -> (at, is left, num_events, pieces, odd events)"},
    {"undo", undo, METH_O, "undo(scanner): forget the last piece"},
    {"finish", finish, METH_O, "finish(scanner) -> (tables, texts, raws, threads, categories, counts)"},
    {"order", order_of_events, METH_O, "order(stream of thread, start, length, event) -> rows by them"},
    {"nest", nest_events, METH_O, "nest(stream of thread, start, length) -> (parents, own times)"},
    {"trim", trim, METH_NOARGS, "trim(): give free memory back to the system"},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
#ifdef __GLIBC__
    /* A slice of a file is a block of its own, which goes back to the system when it is free. The C library would soon put
     * slices between small blocks that stay. */
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_scan", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) { return PyModuleDef_Init(&MODULE); }
