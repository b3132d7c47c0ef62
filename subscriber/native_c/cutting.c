/* Rows of changes for the apply worker: one by one, many alike, or those of whole transactions. */

#define BODY 25 /* where the message begins in the walsender's payload, and behind it the columns of a change */
#define VALUES 33

/* Shape in Python; borrowed. */
typedef struct
{
    PyObject  *add, *null, *key;
    Py_ssize_t ncols, rows, wanted;
    int        partial;
} Shape;

static int
read_shape(PyObject *given, Shape *shape)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 7 || !as_size(PyTuple_GET_ITEM(given, 1), &shape->ncols) ||
        !as_size(PyTuple_GET_ITEM(given, 2), &shape->rows) || !as_size(PyTuple_GET_ITEM(given, 3), &shape->wanted) ||
        shape->ncols == 0 || shape->ncols > 0xFFFF || shape->rows == 0 || shape->rows > 2 ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(given, 6)))
        return 0;
    shape->add = PyTuple_GET_ITEM(given, 0);
    shape->null = PyTuple_GET_ITEM(given, 4);
    shape->partial = PyTuple_GET_ITEM(given, 5) == Py_True;
    shape->key = PyTuple_GET_ITEM(given, 6);
    return 1;
}

/* The next cell; NULL where the column is another than `shape` says, or with an error. */
static PyObject *
next_cell(const byte **at, const byte *end, const Shape *shape, Py_ssize_t *nulls)
{
    Py_ssize_t prefix = shape->wanted ? 4 : 0;
    Column     column;

    if (!next_column(at, end, &column))
        return NULL;
    if (column.status == (shape->wanted ? shape->wanted : 't'))
        return PyBytes_FromStringAndSize((const char *) column.value - prefix, column.length + prefix);
    if (column.status == 'n' || (column.status == 'u' && !shape->wanted))
    {
        ++*nulls;
        return Py_NewRef(shape->null);
    }
    return column.status == 'u' && shape->partial ? Py_NewRef(Py_None) : NULL;
}

static int
has_key(PyObject *row, const Shape *shape)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape->key); i++)
    {
        Py_ssize_t place;

        if (!as_size(PyTuple_GET_ITEM(shape->key, i), &place) || place >= PyList_GET_SIZE(row) ||
            PyList_GET_ITEM(row, place) == shape->null || PyList_GET_ITEM(row, place) == Py_None)
            return 0;
    }
    return 1;
}

/* The cells between `at` and `end`; NULL when there is something else, or with an error. */
static PyObject *
cut_row(const byte *at, const byte *end, const Shape *shape, Py_ssize_t *nulls)
{
    Py_ssize_t ncols = shape->ncols, all = ncols * shape->rows, before = *nulls;
    PyObject  *row = PyList_New(all);

    for (Py_ssize_t i = 0; row != NULL && i < all; i++)
    {
        PyObject *cell = NULL;

        if (i == ncols)
        {
            if (end - at < 3 || *at != 'N' || uint16_at(at + 1) != ncols)
                break;
            at += 3;
        }
        cell = next_cell(&at, end, shape, nulls);
        if (cell == NULL)
            break;
        PyList_SET_ITEM(row, i, cell);
    }
    if (row != NULL && PyList_GET_ITEM(row, all - 1) != NULL && at == end && has_key(row, shape))
        return row;
    Py_XDECREF(row);
    *nulls = before;
    return NULL;
}

/* The same with who takes it: (add, row, nulls). */
static PyObject *
row_of_shape(const byte *at, const byte *end, const Shape *shape)
{
    Py_ssize_t nulls = 0;
    PyObject  *row = cut_row(at, end, shape, &nulls);

    return row == NULL ? NULL : Py_BuildValue("ONn", shape->add, row, nulls);
}

/* (data, pos, shape) */
static PyObject *
cutting_cut(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t  pos;
    Shape       shape;
    PyObject   *row;
    const byte *first;

    if (nargs != 3 || !PyBytes_CheckExact(args[0]) || !as_size(args[1], &pos) || pos > PyBytes_GET_SIZE(args[0]) ||
        !read_shape(args[2], &shape))
        return defer("cutting_cut", args, nargs);
    first = (const byte *) PyBytes_AS_STRING(args[0]);
    row = row_of_shape(first + pos, first + PyBytes_GET_SIZE(args[0]), &shape);
    return row == NULL ? defer("cutting_cut", args, nargs) : row;
}

/* (waiting, most, largest, longest, head, shape) */
static PyObject *
cutting_cut_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t most, largest, longest, size = 0, nulls = 0;
    PyObject  *waiting, *payload, *changes, *rows;
    Shape      shape;

    if (nargs != 6 || !as_size(args[1], &most) || !as_size(args[2], &largest) || !as_size(args[3], &longest) ||
        !PyBytes_CheckExact(args[4]) || PyBytes_GET_SIZE(args[4]) != VALUES - BODY || !read_shape(args[5], &shape))
        return defer("cutting_cut_run", args, nargs);
    waiting = PyObject_GetIter(args[0]);
    if (waiting == NULL)
        return defer("cutting_cut_run", args, nargs);
    shape.partial = 0;
    changes = PyList_New(0);
    rows = PyList_New(0);
    while (changes != NULL && rows != NULL && PyList_GET_SIZE(rows) < most && size < largest &&
           (payload = PyIter_Next(waiting)) != NULL)
    {
        const byte *first = PyBytes_CheckExact(payload) ? (const byte *) PyBytes_AS_STRING(payload) : NULL;
        Py_ssize_t  length = first == NULL ? 0 : PyBytes_GET_SIZE(payload);
        PyObject   *row = NULL;

        if (length >= VALUES && length <= longest && *first == 'w' &&
            memcmp(first + BODY, PyBytes_AS_STRING(args[4]), VALUES - BODY) == 0)
            row = cut_row(first + VALUES, first + length, &shape, &nulls);
        if (row != NULL && PyList_Append(rows, row) == 0 && PyList_Append(changes, payload) == 0)
            size += length;
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

/* What `shapes` or find() says of a change that begins with `head`; NULL with an error. */
static PyObject *
shape_of(PyObject *shapes, const byte *head, PyObject *find)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *) head, VALUES - BODY), *shape;

    if (key == NULL)
        return NULL;
    shape = Py_XNewRef(PyDict_GetItemWithError(shapes, key));
    if (shape == NULL && !PyErr_Occurred())
    {
        shape = PyObject_CallOneArg(find, key);
        if (shape != NULL && PyDict_SetItem(shapes, key, shape) < 0)
            Py_CLEAR(shape);
    }
    Py_DECREF(key);
    return shape;
}

#define BEGIN_SIZE 21
#define COMMIT_SIZE 26
#define OF_ONE 32

/* What was taken; of the transaction that has begun, what its BEGIN says. */
typedef struct
{
    PyObject  *ended, *changes, *rows, *shapes, *find;
    Py_ssize_t longest, stop;
    int        begun, inside;
    uint64_t   finish_lsn, commit_time;
    uint32_t   xid;
} Taken;

static int
take_begin(Taken *taken, const byte *message, Py_ssize_t length)
{
    if (length != BEGIN_SIZE || *message != 'B')
        return 0;
    taken->finish_lsn = uint64_at(message + 1);
    taken->commit_time = uint64_at(message + 9);
    taken->xid = uint32_at(message + 17);
    taken->begun = 1;
    return 1;
}

static int
take_commit(Taken *taken, const byte *message)
{
    Py_ssize_t stop = PyList_GET_SIZE(taken->rows);
    PyObject  *end;
    int        failed;

    if (!taken->begun || stop == taken->stop || message[1] != 0 || taken->finish_lsn == 0 ||
        uint64_at(message + 2) != taken->finish_lsn)
        return 0;
    end = Py_BuildValue(
        "KLkKn", taken->finish_lsn, (int64_t) taken->commit_time, (unsigned long) taken->xid, uint64_at(message + 10), stop);
    failed = end == NULL || PyList_Append(taken->ended, end) < 0;
    Py_XDECREF(end);
    taken->stop = stop;
    taken->begun = 0;
    return !failed;
}

/* 0 if it is none that can be taken, or with an error. */
static int
take_change(Taken *taken, PyObject *payload)
{
    const byte *first = (const byte *) PyBytes_AS_STRING(payload);
    PyObject   *given = shape_of(taken->shapes, first + BODY, taken->find), *row = NULL;
    Shape       shape;
    int         failed;

    if (given != NULL && given != Py_None && PyBytes_GET_SIZE(payload) <= taken->longest && read_shape(given, &shape) &&
        !(taken->begun && PyList_GET_SIZE(taken->rows) - taken->stop >= OF_ONE))
        row = row_of_shape(first + VALUES, first + PyBytes_GET_SIZE(payload), &shape);
    Py_XDECREF(given);
    if (row == NULL)
        return 0;
    failed = PyList_Append(taken->rows, row) < 0 || PyList_Append(taken->changes, payload) < 0;
    Py_DECREF(row);
    return !failed;
}

static int
take_message(Taken *taken, PyObject *payload)
{
    const byte *first = PyBytes_CheckExact(payload) ? (const byte *) PyBytes_AS_STRING(payload) : NULL;
    Py_ssize_t  length = first == NULL ? 0 : PyBytes_GET_SIZE(payload);

    if (length < VALUES || *first != 'w')
        return 0;
    if (!taken->begun && !taken->inside)
        return take_begin(taken, first + BODY, length - BODY);
    if (first[BODY] == 'C' && length == BODY + COMMIT_SIZE)
        return take_commit(taken, first + BODY);
    return take_change(taken, payload);
}

/* (waiting, most, largest, longest, find, inside) */
static PyObject *
cutting_cut_changes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t most, largest, size = 0;
    PyObject  *waiting, *payload, *found = NULL;
    Taken      taken = {0};
    int        goes_on;

    if (nargs != 6 || !as_size(args[1], &most) || !as_size(args[2], &largest) || !as_size(args[3], &taken.longest))
        return defer("cutting_cut_changes", args, nargs);
    waiting = PyObject_GetIter(args[0]);
    if (waiting == NULL)
        return defer("cutting_cut_changes", args, nargs);
    taken.find = args[4];
    taken.inside = args[5] == Py_True;
    taken.ended = PyList_New(0);
    taken.changes = PyList_New(0);
    taken.rows = PyList_New(0);
    taken.shapes = PyDict_New();
    goes_on = taken.ended != NULL && taken.changes != NULL && taken.rows != NULL && taken.shapes != NULL;
    while (goes_on && PyList_GET_SIZE(taken.rows) < most && size < largest && (payload = PyIter_Next(waiting)) != NULL)
    {
        Py_ssize_t before = PyList_GET_SIZE(taken.rows);

        goes_on = take_message(&taken, payload);
        if (PyList_GET_SIZE(taken.rows) > before)
            size += PyBytes_GET_SIZE(payload);
        Py_DECREF(payload);
    }
    Py_DECREF(waiting);
    if (taken.inside && taken.rows != NULL)
        taken.stop = PyList_GET_SIZE(taken.rows);
    if (!PyErr_Occurred() && PyList_SetSlice(taken.changes, taken.stop, PY_SSIZE_T_MAX, NULL) == 0 &&
        PyList_SetSlice(taken.rows, taken.stop, PY_SSIZE_T_MAX, NULL) == 0)
        found = PyTuple_Pack(3, taken.ended, taken.changes, taken.rows);
    Py_XDECREF(taken.ended);
    Py_XDECREF(taken.changes);
    Py_XDECREF(taken.rows);
    Py_XDECREF(taken.shapes);
    return found;
}
