/* Bytes off the wire, never behind their end; and how what is not plain is left to the reference. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <datetime.h>
#include <structmember.h>

typedef unsigned char byte;

static PyObject *references;   /* name: the Python function or class */
static PyObject *decimal_type; /* decimal.Decimal */
static PyObject *name_plan, *name_dict;

static inline uint32_t
uint16_at(const byte *p)
{
    return (uint32_t) p[0] << 8 | p[1];
}

static inline uint32_t
uint32_at(const byte *p)
{
    return (uint32_t) p[0] << 24 | (uint32_t) p[1] << 16 | (uint32_t) p[2] << 8 | p[3];
}

static inline uint64_t
uint64_at(const byte *p)
{
    return (uint64_t) uint32_at(p) << 32 | uint32_at(p + 4);
}

/* One column of a row. `status` and `length` are on the wire, before `value`; without value its length is 0. */
typedef struct
{
    int         status;
    const byte *value;
    Py_ssize_t  length;
} Column;

/* Read the column at *at and move there behind it; 0 where it is not one, or not as a whole before `end`. */
static inline int
next_column(const byte **at, const byte *end, Column *column)
{
    const byte *p = *at;

    if (p >= end)
        return 0;
    column->status = *p++;
    column->length = 0;
    switch (column->status)
    {
        case 't':
        case 'b':
            if (end - p < 4)
                return 0;
            uint32_t length = uint32_at(p);

            p += 4;
            if ((uint64_t) (end - p) < length)
                return 0;
            column->length = length;
            break;
        case 'n':
        case 'u':
            break;
        default:
            return 0;
    }
    column->value = p;
    *at = p + column->length;
    return 1;
}

/* --- leaving it to the reference ----------------------------------------------------------------- */

static PyObject *
reference(const char *name) /* borrowed */
{
    PyObject *found = PyDict_GetItemString(references, name);

    if (found == NULL)
        PyErr_Format(PyExc_RuntimeError, "%s has no reference", name);
    return found;
}

static PyObject *
defer(const char *name, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *function;

    if (PyErr_Occurred())
    {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
    }
    function = reference(name);
    return function == NULL ? NULL : PyObject_Vectorcall(function, args, nargs, NULL);
}

/* An argument that is a position or number; 0 if it is none. */
static inline int
as_size(PyObject *object, Py_ssize_t *value)
{
    if (!PyLong_CheckExact(object))
        return 0;
    *value = PyLong_AsSsize_t(object);
    if (*value == -1)
        PyErr_Clear(); /* it does not fit */
    return *value >= 0;
}
