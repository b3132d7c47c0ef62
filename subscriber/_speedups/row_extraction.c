/* Rows of changes for the apply worker: one by one, the keys of many alike, or those of whole transactions. */

#define BODY 25 /* where the message begins in the walsender's payload, and behind it the columns of a change */
#define VALUES 33

static PyObject *null_cell;

/* Shape in Python; borrowed. */
typedef struct
{
    PyObject  *add, *key;
    Py_ssize_t ncols, rows, form;
    int        partial;
} Shape;

static int
read_shape(PyObject *given, Shape *shape)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 6 || !as_size(PyTuple_GET_ITEM(given, 1), &shape->ncols) ||
        !as_size(PyTuple_GET_ITEM(given, 2), &shape->rows) || !as_size(PyTuple_GET_ITEM(given, 3), &shape->form) ||
        shape->ncols == 0 || shape->ncols > 0xFFFF || shape->rows == 0 || shape->rows > 2 ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(given, 5)))
        return 0;
    shape->add = PyTuple_GET_ITEM(given, 0);
    shape->partial = PyTuple_GET_ITEM(given, 4) == Py_True;
    shape->key = PyTuple_GET_ITEM(given, 5);
    return 1;
}

/* The columns of one row or two, which end at `end`; 0 where there is something else, or a column is of another form. */
static int
read_rows(const byte *at, const byte *end, Py_ssize_t ncols, Py_ssize_t rows, int form, Column *columns)
{
    for (Py_ssize_t i = 0; i < ncols * rows; i++)
    {
        if (i == ncols)
        {
            if (end - at < 3 || *at != 'N' || uint16_at(at + 1) != ncols)
                return 0;
            at += 3;
        }
        if (!next_column(&at, end, &columns[i]) ||
            (columns[i].status != form && columns[i].status != 'n' && columns[i].status != 'u'))
            return 0;
    }
    return at == end;
}

static PyObject *
cell_of(const Column *column)
{
    if (column->status == 'n')
        return Py_NewRef(null_cell);
    if (column->status == 'u')
        return Py_NewRef(Py_None);
    return PyBytes_FromStringAndSize((const char *) column->value - 4, column->length + 4);
}

static int
has_key(PyObject *row, const Shape *shape)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape->key); i++)
    {
        Py_ssize_t place;

        if (!as_size(PyTuple_GET_ITEM(shape->key, i), &place) || place >= PyList_GET_SIZE(row) ||
            PyList_GET_ITEM(row, place) == null_cell || PyList_GET_ITEM(row, place) == Py_None)
            return 0;
    }
    return 1;
}

#define FEW 64 /* columns for which the stack has room */

/* The cells between `at` and `end`; NULL when there is something else, or with an error. */
static PyObject *
cut_row(const byte *at, const byte *end, const Shape *shape)
{
    Py_ssize_t all = shape->ncols * shape->rows;
    Column     few[FEW], *columns = all <= FEW ? few : PyMem_New(Column, all);
    PyObject  *row = NULL;

    if (columns == NULL)
        return PyErr_NoMemory();
    if (read_rows(at, end, shape->ncols, shape->rows, (int) shape->form, columns))
        row = PyList_New(all);
    for (Py_ssize_t i = 0; row != NULL && i < all; i++)
    {
        PyObject *cell = columns[i].status == 'u' && !shape->partial ? NULL : cell_of(&columns[i]);

        if (cell == NULL)
            Py_CLEAR(row);
        else
            PyList_SET_ITEM(row, i, cell);
    }
    if (columns != few)
        PyMem_Free(columns);
    if (row != NULL && !has_key(row, shape))
        Py_CLEAR(row);
    return row;
}

/* The same with who takes it: (add, row). */
static PyObject *
row_of_shape(const byte *at, const byte *end, const Shape *shape)
{
    PyObject *row = cut_row(at, end, shape);

    return row == NULL ? NULL : Py_BuildValue("ON", shape->add, row);
}

/* (data, pos, shape) */
static PyObject *
row_extraction_extract_row(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t  pos;
    Shape       shape;
    PyObject   *row;
    const byte *first;

    if (nargs != 3 || !PyBytes_CheckExact(args[0]) || !as_size(args[1], &pos) || pos > PyBytes_GET_SIZE(args[0]) ||
        !read_shape(args[2], &shape))
        return defer("row_extraction_extract_row", args, nargs);
    first = (const byte *) PyBytes_AS_STRING(args[0]);
    row = row_of_shape(first + pos, first + PyBytes_GET_SIZE(args[0]), &shape);
    return row == NULL ? defer("row_extraction_extract_row", args, nargs) : row;
}

/* Run in Python, with room for the columns of one change. */
typedef struct
{
    Py_ssize_t ncols, rows, form, keys;
    Py_ssize_t key[FEW];
    Column    *columns;
} Run;

static int
read_run(PyObject *given, Run *run)
{
    PyObject *key;

    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4 || !as_size(PyTuple_GET_ITEM(given, 0), &run->ncols) ||
        !as_size(PyTuple_GET_ITEM(given, 1), &run->rows) || !as_size(PyTuple_GET_ITEM(given, 2), &run->form) ||
        run->ncols == 0 || run->ncols > 0xFFFF || run->rows == 0 || run->rows > 2)
        return 0;
    key = PyTuple_GET_ITEM(given, 3);
    if (!PyTuple_CheckExact(key) || PyTuple_GET_SIZE(key) > FEW)
        return 0;
    run->keys = PyTuple_GET_SIZE(key);
    for (Py_ssize_t i = 0; i < run->keys; i++)
        if (!as_size(PyTuple_GET_ITEM(key, i), &run->key[i]) || run->key[i] >= run->ncols)
            return 0;
    return 1;
}

/* Whether the change is whole, and what it is known by is not NULL; its columns are in `run`. */
static int
reads_run(const byte *at, const byte *end, Run *run)
{
    if (!read_rows(at, end, run->ncols, run->rows, (int) run->form, run->columns))
        return 0;
    for (Py_ssize_t i = 0; i < run->ncols * run->rows; i++)
        if (run->columns[i].status == 'u')
            return 0;
    for (Py_ssize_t i = 0; i < run->keys * run->rows; i++)
        if (run->columns[i / run->keys * run->ncols + run->key[i % run->keys]].status == 'n')
            return 0;
    return 1;
}

/* What the row that begins at `columns` is known by. */
static PyObject *
key_of(const Column *columns, const Run *run)
{
    Py_ssize_t before = run->form == 't' ? 0 : 4;
    PyObject  *found = run->keys == 1 ? NULL : PyTuple_New(run->keys);

    if (run->keys != 1 && found == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < run->keys; i++)
    {
        const Column *column = &columns[run->key[i]];
        PyObject     *part = PyBytes_FromStringAndSize((const char *) column->value - before, column->length + before);

        if (run->keys == 1)
            return part;
        if (part == NULL)
        {
            Py_DECREF(found);
            return NULL;
        }
        PyTuple_SET_ITEM(found, i, part);
    }
    return found;
}

static int
append_key(PyObject *keys, const Column *columns, const Run *run)
{
    PyObject *key = key_of(columns, run);
    int       failed = key == NULL || PyList_Append(keys, key) < 0;

    Py_XDECREF(key);
    return !failed;
}

/* (waiting, most, largest, longest, head, run) */
static PyObject *
row_extraction_extract_keys(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t most, largest, longest, size = 0;
    PyObject  *waiting, *payload, *changes, *before, *after;
    Run        run;
    int        goes_on;

    if (nargs != 6 || !as_size(args[1], &most) || !as_size(args[2], &largest) || !as_size(args[3], &longest) ||
        !PyBytes_CheckExact(args[4]) || PyBytes_GET_SIZE(args[4]) != VALUES - BODY || !read_run(args[5], &run))
        return defer("row_extraction_extract_keys", args, nargs);
    waiting = PyObject_GetIter(args[0]);
    if (waiting == NULL)
        return defer("row_extraction_extract_keys", args, nargs);
    run.columns = PyMem_New(Column, run.ncols * run.rows);
    changes = PyList_New(0);
    before = PyList_New(0);
    after = run.rows == 2 ? PyList_New(0) : Py_XNewRef(before);
    goes_on = run.columns != NULL && changes != NULL && before != NULL && after != NULL;
    while (goes_on && PyList_GET_SIZE(changes) < most && size < largest && (payload = PyIter_Next(waiting)) != NULL)
    {
        const byte *first = PyBytes_CheckExact(payload) ? (const byte *) PyBytes_AS_STRING(payload) : NULL;
        Py_ssize_t  length = first == NULL ? 0 : PyBytes_GET_SIZE(payload);

        goes_on = length >= VALUES && length <= longest && *first == 'w' &&
            memcmp(first + BODY, PyBytes_AS_STRING(args[4]), VALUES - BODY) == 0 &&
            reads_run(first + VALUES, first + length, &run) && PyList_Append(changes, payload) == 0;
        if (goes_on)
            size += length;
        if (goes_on && run.keys > 0)
            goes_on = append_key(before, run.columns, &run) &&
                (run.rows == 1 || append_key(after, run.columns + run.ncols, &run));
        Py_DECREF(payload);
    }
    Py_DECREF(waiting);
    if (run.columns == NULL)
        PyErr_NoMemory();
    PyMem_Free(run.columns);
    if (PyErr_Occurred())
    {
        Py_XDECREF(changes);
        Py_XDECREF(before);
        Py_XDECREF(after);
        return NULL;
    }
    return Py_BuildValue("NNNn", changes, before, after, size);
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
row_extraction_extract_changes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t most, largest, size = 0;
    PyObject  *waiting, *payload, *found = NULL;
    Taken      taken = {0};
    int        goes_on;

    if (nargs != 6 || !as_size(args[1], &most) || !as_size(args[2], &largest) || !as_size(args[3], &taken.longest))
        return defer("row_extraction_extract_changes", args, nargs);
    waiting = PyObject_GetIter(args[0]);
    if (waiting == NULL)
        return defer("row_extraction_extract_changes", args, nargs);
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
