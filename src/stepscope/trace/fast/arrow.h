/* A column as the two structures of Arrow's C data interface, which any dataframe library takes without a copy. */
#ifndef STEPSCOPE_ARROW_H
#define STEPSCOPE_ARROW_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct ArrowSchema {
    const char *format, *name, *metadata;
    int64_t flags, n_children;
    struct ArrowSchema **children, *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

struct ArrowArrayStream {
    int (*get_schema)(struct ArrowArrayStream *, struct ArrowSchema *);
    int (*get_next)(struct ArrowArrayStream *, struct ArrowArray *);
    const char *(*get_last_error)(struct ArrowArrayStream *);
    void (*release)(struct ArrowArrayStream *);
    void *private_data;
};

static void release_schema(struct ArrowSchema *schema) { schema->release = NULL; }

static void release_array(struct ArrowArray *array) {
    free((void *)array->buffers[0]);
    free((void *)array->buffers[1]);
    free(array->buffers);
    array->release = NULL;
}

static void free_schema(PyObject *capsule) {
    struct ArrowSchema *schema = PyCapsule_GetPointer(capsule, "arrow_schema");
    if (schema && schema->release)
        schema->release(schema);
    free(schema);
}

static void free_array(PyObject *capsule) {
    struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (array && array->release)
        array->release(array);
    free(array);
}

/* A pair of capsules. Takes the cells and bits over, in any case. */
static PyObject *as_arrow(const char *format, size_t num_rows, size_t num_valid, uint8_t *bits, void *cells) {
    struct ArrowSchema *schema = calloc(1, sizeof *schema);
    struct ArrowArray *array = calloc(1, sizeof *array);
    const void **buffers = calloc(2, sizeof *buffers);
    PyObject *schema_capsule = NULL, *array_capsule = NULL, *pair = NULL;
    if (!schema || !array || !buffers) {
        PyErr_NoMemory();
        goto fail;
    }
    if (num_valid == num_rows) {
        free(bits);
        bits = NULL;
    }
    *schema = (struct ArrowSchema){.format = format, .name = "", .flags = 2 /* nullable */, .release = release_schema};
    *array = (struct ArrowArray){.length = (int64_t)num_rows, .null_count = (int64_t)(num_rows - num_valid),
                                 .n_buffers = 2, .buffers = buffers, .release = release_array};
    if (!(schema_capsule = PyCapsule_New(schema, "arrow_schema", free_schema)))
        goto fail;
    schema = NULL; /* it is the capsule's now */
    if (!(array_capsule = PyCapsule_New(array, "arrow_array", free_array)))
        goto fail;
    array = NULL;
    buffers[0] = bits, buffers[1] = cells;
    buffers = NULL, bits = NULL, cells = NULL;
    pair = PyTuple_Pack(2, schema_capsule, array_capsule);
fail:
    Py_XDECREF(schema_capsule);
    Py_XDECREF(array_capsule);
    free(schema);
    free(array);
    free(buffers);
    free(bits);
    free(cells);
    return pair;
}

#endif
