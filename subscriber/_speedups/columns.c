/* Messages out of what was received, and the columns of rows. */

/* (buffer, start, end, found) */
static PyObject *
frontend_cut_copy_data(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t start, end, size = 0;

    if (nargs != 4 || !PyByteArray_CheckExact(args[0]) || !as_size(args[1], &start) || !as_size(args[2], &end) ||
        end > PyByteArray_GET_SIZE(args[0]) || !PyList_CheckExact(args[3]))
        return defer("frontend_cut_copy_data", args, nargs);
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
copy_data_weigh(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t size = 0;

    if (nargs != 1 || !PyList_CheckExact(args[0]))
        return defer("copy_data_weigh", args, nargs);
    PyObject *keepalives = PyList_New(0);

    for (Py_ssize_t i = 0; keepalives != NULL && i < PyList_GET_SIZE(args[0]); i++)
    {
        PyObject *frame = PyList_GET_ITEM(args[0], i);

        if (!PyBytes_CheckExact(frame))
        {
            Py_DECREF(keepalives);
            return defer("copy_data_weigh", args, nargs);
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
tuple_data_skip_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols;
    Column      column;

    if (nargs != 3 || !columns_of(args, &at, &end, &ncols))
        return defer("tuple_data_skip_columns", args, nargs);
    for (; ncols > 0; ncols--)
        if (!next_column(&at, end, &column))
            return defer("tuple_data_skip_columns", args, nargs);
    return PyLong_FromSsize_t(at - (byte *) PyBytes_AS_STRING(args[0]));
}

/* (data, pos, ncols) */
static PyObject *
tuple_data_split_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const byte *at, *end;
    Py_ssize_t  ncols;
    Column      column;

    if (nargs != 3 || !columns_of(args, &at, &end, &ncols))
        return defer("tuple_data_split_columns", args, nargs);
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
    return defer("tuple_data_split_columns", args, nargs);
}
