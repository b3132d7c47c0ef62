/*
 * The innermost loops in C: what arrived is cut into messages, messages into rows, rows into values.
 *
 * Everything here stands in for a Python function or class marked @compiled (native.py) and has its name, with the
 * module's in front. That one is the reference: it has the documentation, and runs where this was not built. Here is
 * the good case only. Whatever is damaged, unusual or out of range is left to the reference, which raises what there
 * is to raise, so that the two cannot disagree about errors. Two rules make that safe:
 *
 *   - no byte is read before its place has been compared with the end (struct bytes and next_column() below);
 *   - nothing that the caller can see is changed before a row, or a message, is known to be good.
 *
 * Rows and changes have no reference to anything that could refer back to them, so they are not known to the
 * garbage collector, which would look at each of a million objects to find that out.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <datetime.h>
#include <structmember.h>

typedef unsigned char byte;

static PyObject *references;   /* name: the Python function or class */
static PyObject *decimal_type; /* decimal.Decimal */
static PyObject *name_plan, *name_dict;

/* --- bytes ------------------------------------------------------------------------------------- */

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
    return *value >= 0;
}

/* --- values: bytes of one value into a Python object ----------------------------------------------- */

/* NULL without an error: the reference is to read it. */
typedef PyObject *(*read_value)(const byte *p, Py_ssize_t n);

/* What reads values of a type: called with bytes, as its reference is, or by row_dict() without making bytes. */
typedef struct
{
    PyObject_HEAD
    vectorcallfunc call;
    read_value  read;
    const char *name;
    PyObject   *reference;
} Value;

static PyTypeObject ValueType;

static PyObject *
value_from(PyObject *converter, const byte *p, Py_ssize_t n)
{
    PyObject *bytes, *found;

    if (Py_TYPE(converter) == &ValueType)
    {
        found = ((Value *) converter)->read(p, n);
        if (found != NULL)
            return found;
        PyErr_Clear();
        converter = ((Value *) converter)->reference;
        if (converter == NULL)
            return PyErr_Format(PyExc_RuntimeError, "no reference");
    }
    bytes = PyBytes_FromStringAndSize((const char *) p, n);
    if (bytes == NULL)
        return NULL;
    found = PyObject_CallOneArg(converter, bytes);
    Py_DECREF(bytes);
    return found;
}

static PyObject *
value_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Value *value = (Value *) self;

    if (PyVectorcall_NARGS(nargsf) == 1 && names == NULL && PyBytes_CheckExact(args[0]))
    {
        PyObject *found = value->read((byte *) PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]));

        if (found != NULL)
            return found;
        PyErr_Clear();
    }
    if (value->reference == NULL)
        return PyErr_Format(PyExc_RuntimeError, "%s has no reference", value->name);
    return PyObject_Vectorcall(value->reference, args, nargsf, names);
}

static PyObject *
value_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<compiled %s>", ((Value *) self)->name);
}

static PyTypeObject ValueType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "subscriber._native.Value",
    .tp_basicsize = sizeof(Value),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Value, call),
    .tp_call = PyVectorcall_Call,
    .tp_repr = value_repr,
};

static PyObject *
text_values_text(const byte *p, Py_ssize_t n)
{
    return PyUnicode_DecodeUTF8((const char *) p, n, "surrogateescape");
}

static PyObject *
text_values_boolean(const byte *p, Py_ssize_t n)
{
    return PyBool_FromLong(n == 1 && *p == 't');
}

static PyObject *
text_values_integer(const byte *p, Py_ssize_t n)
{
    long long number = 0;
    int       negative = n > 1 && *p == '-';

    if (negative)
        p++, n--;
    if (n < 1 || n > 18)
        return NULL;
    for (; n > 0; p++, n--)
    {
        if (*p < '0' || *p > '9')
            return NULL;
        number = number * 10 + (*p - '0');
    }
    return PyLong_FromLongLong(negative ? -number : number);
}

static PyObject *
text_values_float8(const byte *p, Py_ssize_t n)
{
    char   copy[40];
    char  *end;
    double number;

    if (n < 1 || n >= (Py_ssize_t) sizeof(copy) || *p == ' ')
        return NULL;
    memcpy(copy, p, n);
    copy[n] = '\0';
    number = PyOS_string_to_double(copy, &end, NULL);
    if (end != copy + n || (number == -1.0 && PyErr_Occurred()))
        return NULL;
    return PyFloat_FromDouble(number);
}

static PyObject *
decimal_of(const char *p, Py_ssize_t n)
{
    PyObject *text = PyUnicode_FromKindAndData(PyUnicode_1BYTE_KIND, p, n);
    PyObject *found;

    if (text == NULL)
        return NULL;
    found = PyObject_CallOneArg(decimal_type, text);
    Py_DECREF(text);
    return found;
}

static PyObject *
text_values_numeric(const byte *p, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        if ((p[i] < '0' || p[i] > '9') && p[i] != '.' && p[i] != '-')
            return NULL; /* NaN, Infinity, damage */
    return decimal_of((const char *) p, n);
}

/* Two digits at `p`, or a number that is none of any calendar. */
static inline int
two_at(const byte *p)
{
    unsigned tens = p[0] - '0', ones = p[1] - '0';

    return tens > 9 || ones > 9 ? 1000000 : (int) (tens * 10 + ones);
}

static PyObject *
text_values_a_date(const byte *p, Py_ssize_t n)
{
    if (n != 10 || p[4] != '-' || p[7] != '-')
        return NULL;
    return PyDate_FromDate(two_at(p) * 100 + two_at(p + 2), two_at(p + 5), two_at(p + 8));
}

/* The zone that many seconds east; the last one is remembered, since a server writes one and the same. */
static PyObject *
zone_of(int seconds)
{
    static int       last_seconds;
    static PyObject *last;
    PyObject        *delta;

    if (seconds == 0)
        return Py_NewRef(PyDateTime_TimeZone_UTC);
    if (last == NULL || seconds != last_seconds)
    {
        delta = PyDelta_FromDSU(0, seconds, 0);
        if (delta == NULL)
            return NULL;
        Py_XSETREF(last, PyTimeZone_FromOffset(delta));
        Py_DECREF(delta);
        last_seconds = seconds;
        if (last == NULL)
            return NULL;
    }
    return Py_NewRef(last);
}

/* +HH[:MM[:SS]] at `p`, exactly `n` bytes; new reference. */
static PyObject *
zone_at(const byte *p, Py_ssize_t n)
{
    int seconds = 0;

    if ((n != 3 && n != 6 && n != 9) || (*p != '+' && *p != '-'))
        return NULL;
    for (int i = 0, unit = 3600; i < n; i += 3, unit /= 60)
    {
        int part = two_at(p + i + 1);

        if (part > (i ? 59 : 23) || (i && p[i] != ':'))
            return NULL;
        seconds += part * unit;
    }
    return zone_of(*p == '-' ? -seconds : seconds);
}

/* YYYY-MM-DD HH:MM:SS[.ffffff], and a zone if `zoned`. */
static PyObject *
timestamp_of(const byte *p, Py_ssize_t n, int zoned)
{
    int        micros = 0;
    Py_ssize_t at = 19;
    PyObject  *zone = Py_None, *found;

    if (n < 19 || p[4] != '-' || p[7] != '-' || p[10] != ' ' || p[13] != ':' || p[16] != ':')
        return NULL;
    if (n > 19 && p[19] == '.')
    {
        int unit = 100000;

        for (at = 20; at < n && p[at] >= '0' && p[at] <= '9'; at++, unit /= 10)
            micros += (p[at] - '0') * unit;
        if (at == 20 || at > 26)
            return NULL;
    }
    if (zoned)
    {
        zone = zone_at(p + at, n - at);
        if (zone == NULL)
            return NULL;
    }
    else if (at != n)
        return NULL;
    found = PyDateTimeAPI->DateTime_FromDateAndTime(
        two_at(p) * 100 + two_at(p + 2), two_at(p + 5), two_at(p + 8),
        two_at(p + 11), two_at(p + 14), two_at(p + 17), micros, zone, PyDateTimeAPI->DateTimeType);
    if (zoned)
        Py_DECREF(zone);
    return found;
}

static PyObject *
text_values_timestamp(const byte *p, Py_ssize_t n)
{
    return timestamp_of(p, n, 0);
}

static PyObject *
text_values_timestamptz(const byte *p, Py_ssize_t n)
{
    return timestamp_of(p, n, 1);
}

static PyObject *
binary_values_boolean(const byte *p, Py_ssize_t n)
{
    return PyBool_FromLong(n == 1 && *p == 1);
}

static PyObject *
binary_values_integer(const byte *p, Py_ssize_t n)
{
    switch (n)
    {
        case 2: return PyLong_FromLong((int16_t) uint16_at(p));
        case 4: return PyLong_FromLong((int32_t) uint32_at(p));
        case 8: return PyLong_FromLongLong((int64_t) uint64_at(p));
        default: return NULL;
    }
}

static PyObject *
binary_values_float8(const byte *p, Py_ssize_t n)
{
    uint64_t bits;
    double   number;

    if (n != 8)
        return NULL;
    bits = uint64_at(p);
    memcpy(&number, &bits, sizeof(number));
    return PyFloat_FromDouble(number);
}

/* Groups of four decimal digits; see the reference. */
static PyObject *
binary_values_numeric(const byte *p, Py_ssize_t n)
{
    char digits[160];
    int  length = 0;

    if (n < 8)
        return NULL;
    int ndigits = (int16_t) uint16_at(p), weight = (int16_t) uint16_at(p + 2);
    int sign = uint16_at(p + 4), scale = uint16_at(p + 6);

    if (ndigits < 0 || n != 8 + 2 * (Py_ssize_t) ndigits || (sign != 0 && sign != 0x4000))
        return NULL;
    if (weight < -1 || weight > 15 || scale > 64)
        return NULL; /* for which there is no room */
    if (sign)
        digits[length++] = '-';
    if (weight < 0)
        digits[length++] = '0';
    int before = length + 4 * (weight + 1); /* where the point is */
    int end = before + (scale ? 1 + scale : 0);

    for (int group = 0, i = length; i < end; group++)
    {
        unsigned four = group < ndigits ? uint16_at(p + 8 + 2 * group) : 0;

        if (four > 9999)
            return NULL;
        for (unsigned unit = 1000; unit > 0 && i < end; unit /= 10)
        {
            if (i == before)
                digits[i++] = '.';
            digits[i++] = (char) ('0' + four / unit % 10);
        }
    }
    return decimal_of(digits, end);
}

#define DAY 86400000000LL /* microseconds */

/* The date `days` after 2000-01-01; 0 for one before year 1 or after 9999. */
static int
date_of(int64_t days, int *year, int *month, int *day)
{
    if (days < -730119 || days > 2921939)
        return 0;
    /* Years that begin in March put the leap day at their end. */
    int64_t since = days + 730425; /* 0000-03-01 */
    int     era = (int) (since / 146097), of_era = (int) (since % 146097);
    int     year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int     of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    int     march = (5 * of_year + 2) / 153; /* months since March */

    *day = of_year - (153 * march + 2) / 5 + 1;
    *month = march < 10 ? march + 3 : march - 9;
    *year = year_of_era + era * 400 + (*month <= 2);
    return 1;
}

static PyObject *
binary_timestamp_of(const byte *p, Py_ssize_t n, PyObject *zone)
{
    int year, month, day;

    if (n != 8)
        return NULL;
    int64_t micros = (int64_t) uint64_at(p), days = micros / DAY;
    int64_t rest = micros % DAY;

    if (rest < 0)
        days--, rest += DAY;
    if (!date_of(days, &year, &month, &day))
        return NULL;
    int seconds = (int) (rest / 1000000);

    return PyDateTimeAPI->DateTime_FromDateAndTime(
        year, month, day, seconds / 3600, seconds / 60 % 60, seconds % 60, (int) (rest % 1000000), zone,
        PyDateTimeAPI->DateTimeType);
}

static PyObject *
binary_values_timestamp(const byte *p, Py_ssize_t n)
{
    return binary_timestamp_of(p, n, Py_None);
}

static PyObject *
binary_values_timestamptz(const byte *p, Py_ssize_t n)
{
    return binary_timestamp_of(p, n, PyDateTime_TimeZone_UTC);
}

static PyObject *
binary_values_a_date(const byte *p, Py_ssize_t n)
{
    int year, month, day;

    if (n != 4 || !date_of((int32_t) uint32_at(p), &year, &month, &day))
        return NULL;
    return PyDate_FromDate(year, month, day);
}

#define VALUE(name) {PyObject_HEAD_INIT(&ValueType) value_call, name, #name, NULL}

static Value values[] = {
    VALUE(text_values_text),
    VALUE(text_values_boolean),
    VALUE(text_values_integer),
    VALUE(text_values_float8),
    VALUE(text_values_numeric),
    VALUE(text_values_a_date),
    VALUE(text_values_timestamp),
    VALUE(text_values_timestamptz),
    VALUE(binary_values_boolean),
    VALUE(binary_values_integer),
    VALUE(binary_values_float8),
    VALUE(binary_values_numeric),
    VALUE(binary_values_a_date),
    VALUE(binary_values_timestamp),
    VALUE(binary_values_timestamptz),
};

/* --- rows of a consumer: rows.RowData --------------------------------------------------------------- */

typedef struct
{
    PyObject_HEAD
    PyObject  *relation;
    PyObject  *data; /* bytes */
    PyObject  *older;
    PyObject  *cut;
    PyObject  *plan; /* of the relation; NULL when there is nothing to read by */
    Py_ssize_t start, end;
    char       key_only;
} RowData;

/* How rows of `relation` are read: (the row of NULLs, (name, from text, from binary) of each column); NULL if unknown. */
static PyObject *
plan_of(PyObject *relation)
{
    PyObject *plan = PyObject_GetAttr(relation, name_plan);

    if (plan == NULL)
        PyErr_Clear();
    else if (!PyTuple_CheckExact(plan) || PyTuple_GET_SIZE(plan) != 2 ||
             !PyDict_CheckExact(PyTuple_GET_ITEM(plan, 0)) || !PyTuple_CheckExact(PyTuple_GET_ITEM(plan, 1)))
        Py_CLEAR(plan);
    return plan;
}

static PyObject *
row_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"relation", "data", "start", "end", "key_only", "older", NULL};
    PyObject    *relation, *data, *older = Py_None;
    Py_ssize_t   start, end;
    int          key_only = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, named, "OSnn|$pO", names, &relation, &data, &start, &end, &key_only, &older))
        return NULL;
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(data))
        return PyErr_Format(PyExc_ValueError, "a row lies within its bytes");
    RowData *row = (RowData *) type->tp_alloc(type, 0);
    if (row == NULL)
        return NULL;
    row->relation = Py_NewRef(relation);
    row->data = Py_NewRef(data);
    row->older = Py_NewRef(older);
    row->cut = Py_NewRef(Py_None);
    row->plan = plan_of(relation);
    row->start = start;
    row->end = end;
    row->key_only = (char) key_only;
    return (PyObject *) row;
}

static void
row_dealloc(PyObject *self)
{
    RowData *row = (RowData *) self;

    Py_XDECREF(row->relation);
    Py_XDECREF(row->data);
    Py_XDECREF(row->older);
    Py_XDECREF(row->cut);
    Py_XDECREF(row->plan);
    Py_TYPE(self)->tp_free(self);
}

/* All columns; NULL, perhaps with an error, when one cannot be read here. */
static PyObject *
row_values(RowData *row)
{
    PyObject   *plan = PyTuple_GET_ITEM(row->plan, 1);
    const byte *at = (byte *) PyBytes_AS_STRING(row->data) + row->start;
    const byte *end = (byte *) PyBytes_AS_STRING(row->data) + row->end;
    PyObject   *found = PyDict_Copy(PyTuple_GET_ITEM(row->plan, 0)); /* which need not grow */

    if (found == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan); i++)
    {
        PyObject *column = PyTuple_GET_ITEM(plan, i), *name, *value;
        Column    sent;

        if (!PyTuple_CheckExact(column) || PyTuple_GET_SIZE(column) != 3 || !next_column(&at, end, &sent))
            goto damaged;
        name = PyTuple_GET_ITEM(column, 0);
        switch (sent.status)
        {
            case 't':
                value = value_from(PyTuple_GET_ITEM(column, 1), sent.value, sent.length);
                break;
            case 'b':
                value = value_from(PyTuple_GET_ITEM(column, 2), sent.value, sent.length);
                break;
            case 'n':
                continue; /* it is None already */
            default:
                value = PyObject_GetItem((PyObject *) row, name);
        }
        if (value == NULL || PyDict_SetItem(found, name, value) < 0)
        {
            Py_XDECREF(value);
            goto damaged;
        }
        Py_DECREF(value);
    }
    if (at == end)
        return found;
damaged:
    Py_DECREF(found);
    return NULL;
}

static PyObject *
row_dict(PyObject *self, PyObject *Py_UNUSED(none))
{
    RowData  *row = (RowData *) self;
    PyObject *found, *type;

    if (!row->key_only && row->plan != NULL)
    {
        found = row_values(row);
        if (found != NULL)
            return found;
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
    }
    type = reference("rows_RowData");
    return type == NULL ? NULL : PyObject_CallMethodOneArg(type, name_dict, self);
}

static PyMethodDef row_methods[] = {
    {"dict", row_dict, METH_NOARGS,
     "dict($self, /)\n--\n\nAll columns by name; faster than asking for one after the other."},
    {NULL},
};

static PyMemberDef row_members[] = {
    {"relation", T_OBJECT_EX, offsetof(RowData, relation), READONLY},
    {"_data", T_OBJECT_EX, offsetof(RowData, data), READONLY},
    {"_older", T_OBJECT_EX, offsetof(RowData, older), READONLY},
    {"_cut", T_OBJECT_EX, offsetof(RowData, cut)},
    {"_start", T_PYSSIZET, offsetof(RowData, start), READONLY},
    {"_end", T_PYSSIZET, offsetof(RowData, end), READONLY},
    {"_key_only", T_BOOL, offsetof(RowData, key_only), READONLY},
    {NULL},
};

static PyTypeObject RowDataType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "subscriber._native.rows_RowData",
    .tp_basicsize = sizeof(RowData),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = row_new,
    .tp_dealloc = row_dealloc,
    .tp_methods = row_methods,
    .tp_members = row_members,
};

/* --- changes of a consumer: changes.RowChange -------------------------------------------------------- */

typedef struct
{
    PyObject_HEAD
    PyObject *relation;
    PyObject *old;
    PyObject *new;
    PyObject *subxid;
} RowChange;

static PyObject *
change_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"relation", "old", "new", "subxid", NULL};
    PyObject    *relation, *old, *new, *subxid = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, named, "OOO|O", names, &relation, &old, &new, &subxid))
        return NULL;
    RowChange *change = (RowChange *) type->tp_alloc(type, 0);
    if (change == NULL)
        return NULL;
    change->relation = Py_NewRef(relation);
    change->old = Py_NewRef(old);
    change->new = Py_NewRef(new);
    change->subxid = Py_NewRef(subxid);
    return (PyObject *) change;
}

static void
change_dealloc(PyObject *self)
{
    RowChange *change = (RowChange *) self;

    Py_XDECREF(change->relation);
    Py_XDECREF(change->old);
    Py_XDECREF(change->new);
    Py_XDECREF(change->subxid);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef change_members[] = {
    {"relation", T_OBJECT_EX, offsetof(RowChange, relation), READONLY},
    {"old", T_OBJECT_EX, offsetof(RowChange, old), READONLY},
    {"new", T_OBJECT_EX, offsetof(RowChange, new), READONLY},
    {"subxid", T_OBJECT_EX, offsetof(RowChange, subxid), READONLY},
    {NULL},
};

static PyTypeObject RowChangeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "subscriber._native.changes_RowChange",
    .tp_basicsize = sizeof(RowChange),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = change_new,
    .tp_dealloc = change_dealloc,
    .tp_members = change_members,
};

/* What changes of one run are made of, and the table that the last one was about. */
typedef struct
{
    PyTypeObject *insert, *update, *delete, *row;
    PyObject     *known; /* relid: Relation */
    Py_ssize_t    letter;
    int           in_block;
    uint32_t      relid;
    PyObject     *relation; /* its; NULL before the first */
    PyObject     *plan;
    Py_ssize_t    ncols;
} Making;

/* Make `relid` the table that rows are of; 0 if it is not known. */
static int
find_relation(Making *making, uint32_t relid)
{
    PyObject *key, *relation, *plan;

    if (making->relation != NULL && making->relid == relid)
        return 1;
    key = PyLong_FromUnsignedLong(relid);
    if (key == NULL)
        return 0;
    relation = PyDict_GetItemWithError(making->known, key);
    Py_DECREF(key);
    plan = relation == NULL ? NULL : plan_of(relation);
    if (plan == NULL)
        return 0;
    making->ncols = PyTuple_GET_SIZE(PyTuple_GET_ITEM(plan, 1));
    Py_XSETREF(making->plan, plan);
    Py_XSETREF(making->relation, Py_NewRef(relation));
    making->relid = relid;
    return 1;
}

static PyObject *
make_row(Making *making, PyObject *data, const byte *start, const byte *end, int key_only, PyObject *older)
{
    RowData    *row = (RowData *) making->row->tp_alloc(making->row, 0);
    const byte *first = (byte *) PyBytes_AS_STRING(data);

    if (row == NULL)
        return NULL;
    row->relation = Py_NewRef(making->relation);
    row->data = Py_NewRef(data);
    row->older = Py_NewRef(older);
    row->cut = Py_NewRef(Py_None);
    row->plan = Py_NewRef(making->plan);
    row->start = start - first;
    row->end = end - first;
    row->key_only = (char) key_only;
    return (PyObject *) row;
}

/* The change in `data`, or NULL when it is none, is damaged or of a table that is not known; or with an error. */
static PyObject *
make_change(Making *making, PyObject *data)
{
    const byte   *p = (byte *) PyBytes_AS_STRING(data), *end = p + PyBytes_GET_SIZE(data);
    PyTypeObject *type;
    PyObject     *old = NULL, *new = NULL, *subxid = NULL;
    RowChange    *change;
    int           marker;

    /* The envelope, the letter, the xid that only blocks have, relid, the first row's marker and number of columns. */
    if (end - p < making->letter + 1 + (making->in_block ? 4 : 0) + 7 || (making->letter && *p != 'w'))
        return NULL;
    p += making->letter;
    type = *p == 'I' ? making->insert : *p == 'U' ? making->update : *p == 'D' ? making->delete : NULL;
    if (type == NULL)
        return NULL;
    p += 1;
    if (making->in_block)
    {
        subxid = PyLong_FromUnsignedLong(uint32_at(p));
        if (subxid == NULL)
            return NULL;
        p += 4;
    }
    else
        subxid = Py_NewRef(Py_None);
    if (!find_relation(making, uint32_at(p)) || uint16_at(p + 5) != making->ncols)
        goto damaged;
    marker = p[4];
    p += 7;
    if (type == making->delete)
    {
        if (marker != 'K' && marker != 'O')
            goto damaged;
        old = make_row(making, data, p, end, marker == 'K', Py_None);
        new = Py_NewRef(Py_None);
    }
    else if (marker == 'N')
    {
        old = Py_NewRef(Py_None);
        new = make_row(making, data, p, end, 0, Py_None);
    }
    else if (type == making->update && (marker == 'K' || marker == 'O'))
    {
        const byte *start = p;
        Column      column;

        for (Py_ssize_t i = 0; i < making->ncols; i++)
            if (!next_column(&p, end, &column))
                goto damaged;
        if (end - p < 3 || *p != 'N' || uint16_at(p + 1) != making->ncols)
            goto damaged;
        old = make_row(making, data, start, p, marker == 'K', Py_None);
        if (old != NULL)
            new = make_row(making, data, p + 3, end, 0, marker == 'O' ? old : Py_None);
    }
    if (old == NULL || new == NULL)
        goto damaged;
    change = (RowChange *) type->tp_alloc(type, 0);
    if (change == NULL)
        goto damaged;
    change->relation = Py_NewRef(making->relation);
    change->old = old;
    change->new = new;
    change->subxid = subxid;
    return (PyObject *) change;
damaged:
    Py_XDECREF(old);
    Py_XDECREF(new);
    Py_XDECREF(subxid);
    return NULL;
}

/* (frames, at, known, batch, letter, in_block, (Insert, Update, Delete, Row)) */
static PyObject *
changes_take_changes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Making     making = {0};
    Py_ssize_t at;
    PyObject  *kinds;

    if (nargs != 7 || !PyList_CheckExact(args[0]) || !as_size(args[1], &at) || !PyDict_CheckExact(args[2]) ||
        !PyList_CheckExact(args[3]) || !as_size(args[4], &making.letter) || !PyTuple_CheckExact(args[6]) ||
        PyTuple_GET_SIZE(args[6]) != 4)
        return defer("changes_take_changes", args, nargs);
    kinds = args[6];
    for (int i = 0; i < 4; i++)
        if (!PyType_Check(PyTuple_GET_ITEM(kinds, i)) ||
            !PyType_IsSubtype((PyTypeObject *) PyTuple_GET_ITEM(kinds, i), i < 3 ? &RowChangeType : &RowDataType))
            return defer("changes_take_changes", args, nargs);
    making.insert = (PyTypeObject *) PyTuple_GET_ITEM(kinds, 0);
    making.update = (PyTypeObject *) PyTuple_GET_ITEM(kinds, 1);
    making.delete = (PyTypeObject *) PyTuple_GET_ITEM(kinds, 2);
    making.row = (PyTypeObject *) PyTuple_GET_ITEM(kinds, 3);
    making.known = args[2];
    making.in_block = args[5] == Py_True;
    for (; at < PyList_GET_SIZE(args[0]); at++)
    {
        PyObject *frame = PyList_GET_ITEM(args[0], at);
        PyObject *change = PyBytes_CheckExact(frame) ? make_change(&making, frame) : NULL;

        if (change == NULL)
            break;
        int failed = PyList_Append(args[3], change);

        Py_DECREF(change);
        if (failed)
            break;
    }
    Py_XDECREF(making.relation);
    Py_XDECREF(making.plan);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(at);
}

/* --- messages, and rows of the apply worker --------------------------------------------------------- */

/* (buffer, start, end, found) */
static PyObject *
wire_cut_copy_data(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t start, end, size = 0;

    if (nargs != 4 || !PyByteArray_CheckExact(args[0]) || !as_size(args[1], &start) || !as_size(args[2], &end) ||
        end > PyByteArray_GET_SIZE(args[0]) || !PyList_CheckExact(args[3]))
        return defer("wire_cut_copy_data", args, nargs);
    const byte *buffer = (byte *) PyByteArray_AS_STRING(args[0]);

    while (end - start >= 5 && buffer[start] == 'd')
    {
        uint32_t length = uint32_at(buffer + start + 1);

        if (length < 4 || (uint64_t) (end - start - 1) < length)
            break;
        PyObject *body = PyBytes_FromStringAndSize((const char *) buffer + start + 5, length - 4);

        if (body == NULL || PyList_Append(args[3], body) < 0)
        {
            Py_XDECREF(body);
            return NULL;
        }
        Py_DECREF(body);
        start += 1 + (Py_ssize_t) length;
        size += length;
    }
    return Py_BuildValue("nn", start, size);
}

#define KEEPALIVE 18 /* bytes */

/* (frames) */
static PyObject *
walstream_weigh(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t size = 0;

    if (nargs != 1 || !PyList_CheckExact(args[0]))
        return defer("walstream_weigh", args, nargs);
    PyObject *keepalives = PyList_New(0);

    for (Py_ssize_t i = 0; keepalives != NULL && i < PyList_GET_SIZE(args[0]); i++)
    {
        PyObject *frame = PyList_GET_ITEM(args[0], i);

        if (!PyBytes_CheckExact(frame))
        {
            Py_DECREF(keepalives);
            return defer("walstream_weigh", args, nargs);
        }
        size += PyBytes_GET_SIZE(frame);
        if (PyBytes_GET_SIZE(frame) == KEEPALIVE && *PyBytes_AS_STRING(frame) == 'k' &&
            PyList_Append(keepalives, frame) < 0)
            Py_CLEAR(keepalives);
    }
    return keepalives == NULL ? NULL : Py_BuildValue("nN", size, keepalives);
}

/* The arguments (data, pos, ncols, …): where the columns begin and where the bytes end; 0 if they are others. */
static inline int
columns_of(PyObject *const *args, const byte **at, const byte **end, Py_ssize_t *ncols)
{
    Py_ssize_t pos;

    if (!PyBytes_CheckExact(args[0]) || !as_size(args[1], &pos) || pos > PyBytes_GET_SIZE(args[0]) ||
        !as_size(args[2], ncols) || *ncols > 0xFFFF)
        return 0;
    *at = (byte *) PyBytes_AS_STRING(args[0]) + pos;
    *end = (byte *) PyBytes_AS_STRING(args[0]) + PyBytes_GET_SIZE(args[0]);
    return 1;
}

/* (data, pos, ncols) */
static PyObject *
tuples_skip_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols;
    Column      column;

    if (nargs != 3 || !columns_of(args, &at, &end, &ncols))
        return defer("tuples_skip_columns", args, nargs);
    for (; ncols > 0; ncols--)
        if (!next_column(&at, end, &column))
            return defer("tuples_skip_columns", args, nargs);
    return PyLong_FromSsize_t(at - (byte *) PyBytes_AS_STRING(args[0]));
}

/* (data, pos, ncols) */
static PyObject *
tuples_split_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols;
    Column      column;

    if (nargs != 3 || !columns_of(args, &at, &end, &ncols))
        return defer("tuples_split_columns", args, nargs);
    PyObject *status = PyBytes_FromStringAndSize(NULL, ncols), *values = PyList_New(ncols);

    if (status == NULL || values == NULL)
        goto failed;
    for (Py_ssize_t i = 0; i < ncols; i++)
    {
        if (!next_column(&at, end, &column))
            goto failed;
        PyBytes_AS_STRING(status)[i] = (char) column.status;
        PyObject *value = column.status == 'n' || column.status == 'u'
            ? Py_NewRef(Py_None)
            : PyBytes_FromStringAndSize((const char *) column.value, column.length);

        if (value == NULL)
            goto failed;
        PyList_SET_ITEM(values, i, value);
    }
    return Py_BuildValue("NN", status, values);
failed:
    Py_XDECREF(status);
    Py_XDECREF(values);
    return defer("tuples_split_columns", args, nargs);
}

/* (data, pos, ncols, wanted, null) */
static PyObject *
steps_cells(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols, wanted;
    Column      column;

    if (nargs != 5 || !columns_of(args, &at, &end, &ncols) || !as_size(args[3], &wanted))
        return defer("steps_cells", args, nargs);
    PyObject *cells = PyList_New(ncols);

    for (Py_ssize_t i = 0; cells != NULL && i < ncols; i++)
    {
        PyObject *cell = NULL;

        if (!next_column(&at, end, &column))
            goto failed;
        if (column.status == wanted)
            cell = PyBytes_FromStringAndSize((const char *) column.value - 4, column.length + 4);
        else if (column.status == 'n')
            cell = Py_NewRef(args[4]);
        else if (column.status == 'u')
            cell = Py_NewRef(Py_None);
        if (cell == NULL)
            goto failed;
        PyList_SET_ITEM(cells, i, cell);
    }
    return cells == NULL ? NULL : Py_BuildValue("Nn", cells, at - (byte *) PyBytes_AS_STRING(args[0]));
failed:
    Py_DECREF(cells);
    return defer("steps_cells", args, nargs);
}

/* (data, pos, ncols, null) */
static PyObject *
steps_values(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols, nulls = 0;
    Column      column;

    if (nargs != 4 || !columns_of(args, &at, &end, &ncols))
        return defer("steps_values", args, nargs);
    PyObject *values = PyList_New(ncols);

    for (Py_ssize_t i = 0; values != NULL && i < ncols; i++)
    {
        PyObject *value = NULL;

        if (!next_column(&at, end, &column))
            goto failed;
        if (column.status == 't')
            value = PyBytes_FromStringAndSize((const char *) column.value, column.length);
        else if (column.status != 'b')
            value = Py_NewRef(args[3]), nulls++;
        if (value == NULL)
            goto failed;
        PyList_SET_ITEM(values, i, value);
    }
    return values == NULL ? NULL : Py_BuildValue("Nnn", values, at - (byte *) PyBytes_AS_STRING(args[0]), nulls);
failed:
    Py_DECREF(values);
    return defer("steps_values", args, nargs);
}

#define BODY 25 /* where the message begins in the walsender's payload, and behind it the columns of a change */
#define VALUES 33

/* The row of a change that begins with `head`, to its end; NULL when it is another change or another row, or an error. */
static PyObject *
row_of_run(PyObject *payload, PyObject *head, Py_ssize_t ncols, Py_ssize_t wanted, PyObject *null, Py_ssize_t *nulls)
{
    const byte *at = (byte *) PyBytes_AS_STRING(payload), *end = at + PyBytes_GET_SIZE(payload);
    Py_ssize_t  before = *nulls;
    Column      column;
    PyObject   *row;

    if (end - at < VALUES || *at != 'w' || memcmp(at + BODY, PyBytes_AS_STRING(head), VALUES - BODY) != 0)
        return NULL;
    at += VALUES;
    row = PyList_New(ncols);
    for (Py_ssize_t i = 0; row != NULL && i < ncols; i++)
    {
        PyObject *cell = NULL;
        int       with_length = wanted != 0;

        if (next_column(&at, end, &column))
        {
            if (column.status == (with_length ? wanted : 't'))
                cell = PyBytes_FromStringAndSize(
                    (const char *) column.value - 4 * with_length, column.length + 4 * with_length);
            else if (column.status == 'n' || (column.status == 'u' && !with_length))
                cell = Py_NewRef(null), ++*nulls;
        }
        if (cell == NULL)
            Py_CLEAR(row);
        else
            PyList_SET_ITEM(row, i, cell);
    }
    if (row != NULL && at != end)
        Py_CLEAR(row);
    if (row == NULL)
        *nulls = before;
    return row;
}

/* (waiting, most, largest, longest, head, ncols, wanted, null) */
static PyObject *
steps_cut_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t most, largest, longest, ncols, wanted, size = 0, nulls = 0;
    PyObject  *waiting, *payload, *changes, *rows;

    if (nargs != 8 || !as_size(args[1], &most) || !as_size(args[2], &largest) || !as_size(args[3], &longest) ||
        !PyBytes_CheckExact(args[4]) || PyBytes_GET_SIZE(args[4]) != VALUES - BODY || !as_size(args[5], &ncols) ||
        ncols > 0xFFFF || ncols == 0 || !as_size(args[6], &wanted))
        return defer("steps_cut_run", args, nargs);
    waiting = PyObject_GetIter(args[0]);
    if (waiting == NULL)
        return defer("steps_cut_run", args, nargs);
    changes = PyList_New(0);
    rows = PyList_New(0);
    while (changes != NULL && rows != NULL && PyList_GET_SIZE(rows) < most && size < largest &&
           (payload = PyIter_Next(waiting)) != NULL)
    {
        PyObject *row = NULL;

        if (PyBytes_CheckExact(payload) && PyBytes_GET_SIZE(payload) <= longest)
            row = row_of_run(payload, args[4], ncols, wanted, args[7], &nulls);
        if (row != NULL && PyList_Append(rows, row) == 0)
        {
            size += PyBytes_GET_SIZE(payload);
            PyList_Append(changes, payload);
        }
        Py_DECREF(payload);
        if (row == NULL)
            break;
        Py_DECREF(row);
        if (PyErr_Occurred())
            break;
    }
    Py_DECREF(waiting);
    if (changes == NULL || rows == NULL || PyErr_Occurred())
    {
        Py_XDECREF(changes);
        Py_XDECREF(rows);
        return NULL;
    }
    return Py_BuildValue("NNnn", changes, rows, size, nulls);
}

/* --- the module --------------------------------------------------------------------------------------- */

/* Take in the reference of `name`; called by @compiled. */
static PyObject *
refer(PyObject *self, PyObject *args)
{
    const char *name;
    PyObject   *object;

    if (!PyArg_ParseTuple(args, "sO", &name, &object) || PyDict_SetItemString(references, name, object) < 0)
        return NULL;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(values); i++)
        if (strcmp(values[i].name, name) == 0)
            Py_XSETREF(values[i].reference, Py_NewRef(object));
    Py_RETURN_NONE;
}

#define FUNCTION(name) {#name, (PyCFunction) (void (*)(void)) name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    {"refer", refer, METH_VARARGS, NULL},
    FUNCTION(changes_take_changes),
    FUNCTION(wire_cut_copy_data),
    FUNCTION(walstream_weigh),
    FUNCTION(tuples_skip_columns),
    FUNCTION(tuples_split_columns),
    FUNCTION(steps_cells),
    FUNCTION(steps_values),
    FUNCTION(steps_cut_run),
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "subscriber._native",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *decimal = PyImport_ImportModule("decimal"), *self;

    PyDateTime_IMPORT;
    if (decimal == NULL || PyDateTimeAPI == NULL)
        return NULL;
    decimal_type = PyObject_GetAttrString(decimal, "Decimal");
    Py_DECREF(decimal);
    references = PyDict_New();
    name_plan = PyUnicode_InternFromString("plan");
    name_dict = PyUnicode_InternFromString("dict");
    if (decimal_type == NULL || references == NULL || name_plan == NULL || name_dict == NULL)
        return NULL;
    if (PyType_Ready(&ValueType) < 0 || PyType_Ready(&RowDataType) < 0 || PyType_Ready(&RowChangeType) < 0)
        return NULL;
    self = PyModule_Create(&module);
    if (self == NULL || PyModule_AddStringConstant(self, "SOURCE", SOURCE) < 0 ||
        PyModule_AddObjectRef(self, "rows_RowData", (PyObject *) &RowDataType) < 0 ||
        PyModule_AddObjectRef(self, "changes_RowChange", (PyObject *) &RowChangeType) < 0)
        return NULL;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(values); i++)
        if (PyModule_AddObjectRef(self, values[i].name, (PyObject *) &values[i]) < 0)
            return NULL;
    return self;
}
