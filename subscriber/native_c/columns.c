/* Messages out of what was received, and the columns of rows for the apply worker. */

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
