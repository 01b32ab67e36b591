/* `stepscope.recorder.usual._notes`: PythonNotes of notes.py, in C. After milliseconds of computation, nothing of a hook is in
 * the core's caches: what takes a microsecond in a loop of calls takes twenty between two matrix products. This touches less memory. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>

enum { INTERFACE = 1 }; /* the same as in notes.py; higher after a change of what they hand each other */
enum { FORWARD, BACKWARD, BACKWARD_ENDED, DATA, DATA_ENDED, OPTIMIZER, OPTIMIZER_ENDED, END, NUM_KINDS };
enum { MOST_INPUTS = 64 };

typedef struct {
    PyObject_HEAD
    char is_on, is_inside, in_full, is_explicit, is_odd, waits, fetches, steps, wants_loss;
    unsigned long thread;
    long long due_ns;
    Py_ssize_t num_noted, num_odd, first_of_step, most_steps;
    PyObject *events, *inputs, *optimizer, *root, *shapes, *size;
} Notes;

/* A root module: where its calls go through, and what a call of it needs. */
typedef struct {
    PyObject_HEAD
    PyObject *root, *key, *call;
    Py_ssize_t most_references, most_with_keywords;
} Link;

/* What `use` was given, in its order. */
enum { CLOCK, GRAD_ENABLED, FUNCTION_MODES, BELOW_MODES, TENSOR, WAS_GIVEN, BATCH_SIZE, FAILED, LONG_WAY, NUM_USED };
static PyObject *used[NUM_USED];
static PyObject *kinds[NUM_KINDS];
enum { TRAINING, CALL_IMPL, SHAPE, DTYPE, ENDED, NOTE_UNSEEN, LOSS_OF, INTERPRET, NUM_TEXTS };
static const char *const TEXTS[NUM_TEXTS] = {
    "training", "_call_impl", "shape", "dtype", "ended_unusually", "_note_unseen", "loss_of", "interpret",
};
static PyTypeObject *type_of_links;
static PyObject *texts[NUM_TEXTS];

static void replace(PyObject **place, PyObject *by) {
    PyObject *before = *place;
    *place = by;
    Py_XDECREF(before);
}

static bool is_ours(const Notes *self) { return self->is_on && PyThread_get_thread_ident() == self->thread; }

/* Append an event; takes over `what`, which may be NULL after an error. Return its time in ns, or -1. */
static long long note(Notes *self, int kind, PyObject *now, PyObject *what) {
    PyObject *time = now ? Py_NewRef(now) : what ? PyObject_CallNoArgs(used[CLOCK]) : NULL;
    PyObject *event = what && time ? PyTuple_Pack(3, kinds[kind], time, what) : NULL;
    long long ns = event && PyList_Append(self->events, event) == 0 ? PyLong_AsLongLong(time) : -1;
    Py_XDECREF(event);
    Py_XDECREF(time);
    Py_XDECREF(what);
    return ns;
}

static PyObject *answer(long long ns) { return ns == -1 && PyErr_Occurred() ? NULL : PyBool_FromLong(1); }

/* Return whether a function's answer is true, or -1. */
static int asked(PyObject *function) {
    PyObject *found = PyObject_CallNoArgs(function);
    int result = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return result;
}

/* -- A forward ------------------------------------------------------------------------------------------------------- */

/* Return 1 if a root was called with this input before in this step, 0 if not, -1 after an error. */
static int was_seen(Notes *self, PyObject *given, PyObject *key) {
    Py_ssize_t num = PyList_Size(self->inputs);
    bool is_asked = false;
    for (Py_ssize_t i = num > MOST_INPUTS ? num - MOST_INPUTS : 0; i < num && !is_asked; i++) {
        PyObject *input = PyList_GetItem(self->inputs, i);
        int is_same = PyObject_RichCompareBool(PyTuple_GetItem(input, 1), key, Py_EQ);
        if (is_same < 0)
            return -1;
        PyObject *seen = is_same ? PyObject_CallNoArgs(PyTuple_GetItem(input, 0)) : Py_NewRef(Py_None);
        if (!seen)
            return -1;
        Py_DECREF(seen);
        if (seen == given)
            return 1;
        is_asked = seen != Py_None; /* another tensor, perhaps of the same memory */
    }
    if (!is_asked)
        return 0;
    PyObject *found = PyObject_CallFunctionObjArgs(used[WAS_GIVEN], given, key, self->inputs, NULL);
    int result = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return result;
}

/* What one input adds to the shapes of a call. With `known`, compare; else append to `made`. Return 1, 0, or -1. */
static int one_shape(PyObject *known, Py_ssize_t *at, PyObject *made, PyObject *item) {
    int result = -1;
    if (item && made)
        result = PyList_Append(made, item) == 0 ? 1 : -1;
    else if (item)
        result = *at < PyList_Size(known) ? PyObject_RichCompareBool(PyList_GetItem(known, *at), item, Py_EQ) : 0;
    *at += 1;
    return result;
}

static int shape_of(PyObject *known, Py_ssize_t *at, PyObject *made, PyObject *value) {
    if ((PyObject *)Py_TYPE(value) != used[TENSOR]) {
        if (value == Py_None || PyLong_CheckExact(value))
            return one_shape(known, at, made, value);
        return 0; /* like no other */
    }
    int result = 1;
    PyObject *const names[] = {texts[SHAPE], texts[DTYPE]};
    for (int i = 0; i < 2 && result == 1; i++) {
        PyObject *item = PyObject_GetAttr(value, names[i]);
        if (!item && PyErr_ExceptionMatches(PyExc_RuntimeError)) { /* a nested tensor has no shape */
            PyErr_Clear();
            return 0;
        }
        result = one_shape(known, at, made, item);
        Py_XDECREF(item);
    }
    return result;
}

/* Return 1 if all inputs are like the known ones, or are now in `made`; 0 if one is not; -1 after an error. */
static int shapes_of(PyObject *known, PyObject *made, PyObject *args, PyObject *kwargs) {
    Py_ssize_t at = 0, place = 0;
    PyObject *name, *value;
    int result = 1;
    while (result == 1 && PyDict_Next(kwargs, &place, &name, NULL))
        result = one_shape(known, &at, made, name);
    for (Py_ssize_t i = 0; result == 1 && i < PyTuple_Size(args); i++)
        result = shape_of(known, &at, made, PyTuple_GetItem(args, i));
    place = 0;
    while (result == 1 && PyDict_Next(kwargs, &place, NULL, &value))
        result = shape_of(known, &at, made, value);
    return result == 1 && known && at != PyList_Size(known) ? 0 : result;
}

/* Keep the size of this batch in `self->size`. It is looked up only if an input is not like the last one. */
static bool take_size(Notes *self, PyObject *args, PyObject *kwargs) {
    int is_like = self->shapes != Py_None ? shapes_of(self->shapes, NULL, args, kwargs) : 0;
    if (is_like)
        return is_like == 1;
    PyObject *made = PyList_New(0);
    int is_whole = made ? shapes_of(NULL, made, args, kwargs) : -1;
    PyObject *size = is_whole >= 0 ? PyObject_CallFunctionObjArgs(used[BATCH_SIZE], args, kwargs, NULL) : NULL;
    if (size) {
        replace(&self->shapes, is_whole ? made : Py_NewRef(Py_None));
        replace(&self->size, size);
        made = is_whole ? NULL : made;
    }
    Py_XDECREF(made);
    return size != NULL;
}

/* Note what `forward_begins` has found to be usual. */
static PyObject *note_forward(Notes *self, const Link *link, PyObject *args, PyObject *kwargs) {
    PyObject *given = NULL, *seen = Py_NewRef(Py_None), *what = NULL, *key = link->key;
    PyObject *now = PyObject_CallNoArgs(used[CLOCK]);
    int is_known = 0, is_tensor = 0;
    long long ns = -1;
    Py_ssize_t place = 0;
    self->is_inside = self->waits = 1;
    if (PyTuple_Size(args))
        given = PyTuple_GetItem(args, 0);
    else if (!PyDict_Next(kwargs, &place, NULL, &given))
        given = Py_None;
    is_tensor = PyObject_IsInstance(given, used[TENSOR]);
    if (!now || is_tensor < 0)
        goto done;
    if (is_tensor) {
        is_known = was_seen(self, given, key);
        replace(&seen, PyWeakref_NewRef(given, NULL));
        PyObject *input = is_known >= 0 && seen ? PyTuple_Pack(2, seen, key) : NULL;
        int is_kept = input ? PyList_Append(self->inputs, input) : -1;
        Py_XDECREF(input);
        if (is_kept < 0)
            goto done;
    }
    if (self->root == Py_None)
        replace(&self->root, Py_NewRef(key));
    else if (PyObject_RichCompareBool(self->root, key, Py_NE))
        self->is_odd = 1;
    if (take_size(self, args, kwargs))
        what = PyTuple_Pack(5, key, link->root, self->size, seen, is_known ? Py_True : Py_False);
    ns = note(self, FORWARD, now, what);
done:
    Py_XDECREF(now);
    Py_XDECREF(seen);
    return answer(ns);
}

/* Note a forward below all modes of functions: they would see what is read of a tensor. */
static PyObject *note_unseen(Notes *self, PyObject *const *given, Py_ssize_t num) {
    return note_forward(self, (Link *)given[0], given[1], given[2]);
}

/* Return True if this forward is usual, and note it. */
static PyObject *forward_begins(Notes *self, Link *link, PyObject *root, PyObject *args, PyObject *kwargs) {
    PyObject *trains = PyObject_GetAttr(root, texts[TRAINING]), *result = NULL;
    int is_usual = trains ? PyObject_IsTrue(trains) : -1;
    Py_XDECREF(trains);
    if (is_usual == 1)
        is_usual = asked(used[GRAD_ENABLED]);
    if (is_usual != 1)
        return is_usual < 0 ? NULL : PyBool_FromLong(0);
    int has_modes = asked(used[FUNCTION_MODES]);
    if (has_modes == 0)
        return note_forward(self, link, args, kwargs);
    PyObject *method = has_modes == 1 ? PyObject_GetAttr((PyObject *)self, texts[NOTE_UNSEEN]) : NULL;
    if (method)
        result = PyObject_CallFunctionObjArgs(used[BELOW_MODES], method, link, args, kwargs, NULL);
    Py_XDECREF(method);
    return result;
}

/* Hand an error of ours to `failed`. Return false if that raises, or if it is a KeyboardInterrupt, say. */
static bool is_handled(void) {
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    PyObject *done = PyObject_CallFunctionObjArgs(used[FAILED], error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *forward(Notes *self, PyObject *const *given, Py_ssize_t num) {
    PyObject *args = num == 3 ? given[1] : NULL, *kwargs = num == 3 ? given[2] : NULL;
    if (!args || !PyObject_TypeCheck(given[0], type_of_links) || !PyTuple_Check(args) || !PyDict_Check(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "forward(link, args, kwargs)");
        return NULL;
    }
    Link *link = (Link *)given[0];
    Py_ssize_t most = PyDict_Size(kwargs) ? link->most_with_keywords : link->most_references;
    if (!self->is_on || (!self->is_inside && (self->waits || !is_ours(self))) || Py_REFCNT(given[0]) > most)
        return Py_NewRef(used[LONG_WAY]);
    PyObject *root = PyObject_CallNoArgs(link->root), *call = NULL, *is_usual = NULL, *result = NULL;
    if (root && root != Py_None)
        call = link->call != Py_None ? Py_NewRef(link->call) : PyObject_GetAttr(root, texts[CALL_IMPL]);
    if (call && self->is_inside)
        result = PyObject_Call(call, args, kwargs);
    else {
        if (call)
            is_usual = forward_begins(self, link, root, args, kwargs);
        if (is_usual == Py_True) {
            result = PyObject_Call(call, args, kwargs);
            self->is_inside = 0;
            if (!self->is_on) { /* something unusual has happened inside */
                PyObject *type, *error, *traceback;
                PyErr_Fetch(&type, &error, &traceback);
                PyObject *done = PyObject_CallMethodObjArgs(given[0], texts[ENDED], NULL);
                Py_XDECREF(done);
                if (done)
                    PyErr_Restore(type, error, traceback);
                else {
                    replace(&result, NULL);
                    Py_XDECREF(type);
                    Py_XDECREF(error);
                    Py_XDECREF(traceback);
                }
            }
        } else if (!PyErr_Occurred() || is_handled())
            result = Py_NewRef(used[LONG_WAY]);
    }
    Py_XDECREF(is_usual);
    Py_XDECREF(call);
    Py_XDECREF(root);
    return result;
}

/* Return how many references a link has that `forward` was given. */
static PyObject *num_references(PyObject *type, PyObject *const *given, Py_ssize_t num) {
    return PyLong_FromSsize_t(num ? Py_REFCNT(given[0]) : 0);
}

/* -- The other events ------------------------------------------------------------------------------------------------ */

static PyObject *backward_begins(Notes *self, PyObject *const *given, Py_ssize_t num) {
    if (!self->waits || self->is_inside || !is_ours(self))
        Py_RETURN_FALSE;
    self->is_inside = 1, self->waits = 0;
    PyObject *loss = Py_NewRef(Py_None);
    if (self->wants_loss && num == 2)
        replace(&loss, PyObject_CallMethodObjArgs((PyObject *)self, texts[LOSS_OF], given[0], given[1], NULL));
    return answer(note(self, BACKWARD, NULL, loss));
}

/* Return whether it was noted: something unusual may have happened inside. */
static PyObject *backward_ended(Notes *self, PyObject *nothing) {
    self->is_inside = 0;
    if (!self->is_on)
        Py_RETURN_FALSE;
    return self->in_full ? answer(note(self, BACKWARD_ENDED, NULL, Py_NewRef(Py_None))) : PyBool_FromLong(1);
}

static PyObject *data_begins(Notes *self, PyObject *starts) {
    if (self->is_inside || self->fetches || self->steps || !is_ours(self))
        Py_RETURN_FALSE;
    self->fetches = 1;
    self->is_odd |= starts == Py_True;
    return answer(note(self, DATA, NULL, Py_NewRef(starts)));
}

static PyObject *data_ended(Notes *self, PyObject *nothing) {
    self->fetches = 0;
    return self->is_on ? answer(note(self, DATA_ENDED, NULL, Py_NewRef(Py_None))) : PyBool_FromLong(0);
}

/* Return 1 if an optimizer that is not stepping, or one that is, is the usual one; 0 if not; -1 after an error. */
static int is_usual_one(Notes *self, PyObject *optimizer, bool is_stepping) {
    if (self->steps != is_stepping || self->is_inside || !is_ours(self))
        return 0;
    PyObject *usual = PyObject_CallNoArgs(self->optimizer);
    Py_XDECREF(usual);
    return usual ? usual == optimizer : -1;
}

static PyObject *optimizer_begins(Notes *self, PyObject *optimizer) {
    int is_usual = is_usual_one(self, optimizer, false);
    if (is_usual != 1)
        return is_usual < 0 ? NULL : PyBool_FromLong(0);
    self->steps = 1;
    return self->in_full ? answer(note(self, OPTIMIZER, NULL, PyLong_FromVoidPtr(optimizer))) : PyBool_FromLong(1);
}

static PyObject *end(Notes *self, PyObject *nothing) {
    bool is_odd = self->is_odd || self->waits;
    long long ns = note(self, END, NULL, PyBool_FromLong(is_odd));
    if (ns == -1 && PyErr_Occurred())
        return NULL;
    self->waits = self->is_odd = 0;
    replace(&self->root, Py_NewRef(Py_None));
    if (PyList_SetSlice(self->inputs, 0, PyList_Size(self->inputs), NULL) < 0)
        return NULL;
    self->num_noted++;
    self->num_odd += is_odd;
    self->first_of_step = PyList_Size(self->events);
    if (ns >= self->due_ns || self->num_noted >= self->most_steps)
        return PyObject_CallMethodObjArgs((PyObject *)self, texts[INTERPRET], NULL);
    Py_RETURN_NONE;
}

static PyObject *optimizer_ended(Notes *self, PyObject *optimizer) {
    int is_usual = is_usual_one(self, optimizer, true);
    if (is_usual != 1)
        return is_usual < 0 ? NULL : PyBool_FromLong(0);
    self->steps = 0;
    if (self->is_explicit)
        return self->in_full ? answer(note(self, OPTIMIZER_ENDED, NULL, Py_NewRef(Py_None))) : PyBool_FromLong(1);
    PyObject *done = end(self, NULL);
    Py_XDECREF(done);
    return done ? PyBool_FromLong(1) : NULL;
}

/* -- The types ------------------------------------------------------------------------------------------------------- */

/* Both types begin with a head; what follows are flags and numbers, and objects, which NOTES and LINK list. */
static const size_t NOTES[] = {
    offsetof(Notes, events), offsetof(Notes, inputs), offsetof(Notes, optimizer),
    offsetof(Notes, root), offsetof(Notes, shapes), offsetof(Notes, size), 0,
};
static const size_t LINK[] = {offsetof(Link, root), offsetof(Link, key), offsetof(Link, call), 0};

static PyObject *made(PyTypeObject *type, const size_t *places) {
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    for (; self && *places; places++)
        *(PyObject **)((char *)self + *places) = Py_NewRef(Py_None);
    return self;
}

static int visited(PyObject *self, const size_t *places, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (; *places; places++)
        Py_VISIT(*(PyObject **)((char *)self + *places));
    return 0;
}

static void cleared(PyObject *self, const size_t *places) {
    for (; *places; places++)
        replace((PyObject **)((char *)self + *places), NULL);
}

static void freed(PyObject *self, const size_t *places) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    cleared(self, places);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *new_notes(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Notes *self = (Notes *)made(type, NOTES);
    if (self) {
        replace(&self->events, PyList_New(0));
        replace(&self->inputs, PyList_New(0));
    }
    return (PyObject *)self;
}
static int visit_notes(PyObject *self, visitproc visit, void *arg) { return visited(self, NOTES, visit, arg); }
static int clear_notes(PyObject *self) { return cleared(self, NOTES), 0; }
static void free_notes(PyObject *self) { freed(self, NOTES); }

static PyObject *new_link(PyTypeObject *type, PyObject *args, PyObject *kwargs) { return made(type, LINK); }
static int visit_link(PyObject *self, visitproc visit, void *arg) { return visited(self, LINK, visit, arg); }
static int clear_link(PyObject *self) { return cleared(self, LINK), 0; }
static void free_link(PyObject *self) { freed(self, LINK); }

#define MEMBER(kind, of, name) {#name, kind, offsetof(of, name), 0, NULL}
static PyMemberDef MEMBERS[] = {
    MEMBER(T_BOOL, Notes, is_on), MEMBER(T_BOOL, Notes, is_inside), MEMBER(T_BOOL, Notes, in_full),
    MEMBER(T_BOOL, Notes, is_explicit), MEMBER(T_BOOL, Notes, is_odd), MEMBER(T_BOOL, Notes, waits),
    MEMBER(T_BOOL, Notes, fetches), MEMBER(T_BOOL, Notes, steps), MEMBER(T_BOOL, Notes, wants_loss),
    MEMBER(T_ULONG, Notes, thread), MEMBER(T_LONGLONG, Notes, due_ns), MEMBER(T_PYSSIZET, Notes, num_noted),
    MEMBER(T_PYSSIZET, Notes, num_odd), MEMBER(T_PYSSIZET, Notes, first_of_step),
    MEMBER(T_PYSSIZET, Notes, most_steps), MEMBER(T_OBJECT_EX, Notes, events), MEMBER(T_OBJECT_EX, Notes, inputs),
    MEMBER(T_OBJECT_EX, Notes, optimizer), MEMBER(T_OBJECT_EX, Notes, root), {NULL},
};
static PyMemberDef MEMBERS_OF_LINK[] = {
    MEMBER(T_OBJECT_EX, Link, root), MEMBER(T_OBJECT_EX, Link, key), MEMBER(T_OBJECT_EX, Link, call),
    MEMBER(T_PYSSIZET, Link, most_references), MEMBER(T_PYSSIZET, Link, most_with_keywords), {NULL},
};

#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}
static PyMethodDef METHODS[] = {
    METHOD("forward", forward, METH_FASTCALL),
    METHOD("num_references", num_references, METH_FASTCALL | METH_STATIC),
    METHOD("_note_unseen", note_unseen, METH_FASTCALL),
    METHOD("backward_begins", backward_begins, METH_FASTCALL),
    METHOD("backward_ended", backward_ended, METH_NOARGS),
    METHOD("data_begins", data_begins, METH_O),
    METHOD("data_ended", data_ended, METH_NOARGS),
    METHOD("optimizer_begins", optimizer_begins, METH_O),
    METHOD("optimizer_ended", optimizer_ended, METH_O),
    METHOD("end", end, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS_OF_NOTES[] = {
    {Py_tp_new, new_notes}, {Py_tp_traverse, visit_notes}, {Py_tp_clear, clear_notes}, {Py_tp_dealloc, free_notes},
    {Py_tp_methods, METHODS}, {Py_tp_members, MEMBERS}, {0, NULL},
};
static PyType_Slot SLOTS_OF_LINKS[] = {
    {Py_tp_new, new_link}, {Py_tp_traverse, visit_link}, {Py_tp_clear, clear_link}, {Py_tp_dealloc, free_link},
    {Py_tp_members, MEMBERS_OF_LINK}, {0, NULL},
};
enum { OF_BOTH = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC };
static PyType_Spec SPEC_OF_NOTES = {"stepscope.recorder.usual._notes.Notes", sizeof(Notes), 0, OF_BOTH, SLOTS_OF_NOTES};
static PyType_Spec SPEC_OF_LINKS = {"stepscope.recorder.usual._notes.Link", sizeof(Link), 0, OF_BOTH, SLOTS_OF_LINKS};

/* -- The module ------------------------------------------------------------------------------------------------------ */

static PyObject *use(PyObject *module, PyObject *const *given, Py_ssize_t num) {
    if (num != NUM_USED) {
        PyErr_SetString(PyExc_TypeError, "use() takes what notes.py gives it");
        return NULL;
    }
    for (int i = 0; i < NUM_USED; i++)
        replace(&used[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {METHOD("use", use, METH_FASTCALL), {NULL, NULL, 0, NULL}};

static int prepare(PyObject *module) {
    if (type_of_links) { /* what is static belongs to the first import: another one has the Python version */
        PyErr_SetString(PyExc_ImportError, "already in use by another import of Stepscope");
        return -1;
    }
    for (int i = 0; i < NUM_TEXTS; i++)
        if (!(texts[i] = PyUnicode_InternFromString(TEXTS[i])))
            return -1;
    for (int i = 0; i < NUM_KINDS; i++)
        if (!(kinds[i] = PyLong_FromLong(i)))
            return -1;
    PyObject *type = PyType_FromSpec(&SPEC_OF_NOTES);
    if (!type || PyModule_AddObjectRef(module, "Notes", type) < 0)
        return -1;
    Py_DECREF(type);
    type_of_links = (PyTypeObject *)PyType_FromSpec(&SPEC_OF_LINKS);
    if (!type_of_links || PyModule_AddObjectRef(module, "Link", (PyObject *)type_of_links) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_notes", NULL, 0, FUNCTIONS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__notes(void) { return PyModuleDef_Init(&MODULE); }
