/* Rows put together as the server takes them. */

typedef struct
{
    byte      *data;
    Py_ssize_t size, room;
} Buffer;

/* Room for `more` bytes at the end; 0 where there is none. */
static int
make_room(Buffer *buffer, Py_ssize_t more)
{
    Py_ssize_t room = buffer->room > 0 ? buffer->room : 4096;
    byte      *data;

    if (buffer->room - buffer->size >= more)
        return 1;
    if (more > PY_SSIZE_T_MAX / 4 - buffer->size)
        return 0;
    while (room - buffer->size < more)
        room *= 2;
    data = PyMem_Realloc(buffer->data, room);
    if (data == NULL)
        return 0;
    buffer->data = data;
    buffer->room = room;
    return 1;
}

static int
put(Buffer *buffer, const void *data, Py_ssize_t size)
{
    if (!make_room(buffer, size))
        return 0;
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
    return 1;
}

/* A cell as it came, the length before the value. */
static int
put_cell(Buffer *buffer, const Column *column)
{
    if (column->status == 'n')
        return put(buffer, "\xff\xff\xff\xff", 4);
    return put(buffer, column->value - 4, column->length + 4);
}

/* The same for COPY in text. */
static int
put_text(Buffer *buffer, const Column *column)
{
    byte *p;

    if (column->status == 'n')
        return put(buffer, "\\N", 2);
    if (!make_room(buffer, 2 * column->length))
        return 0;
    p = buffer->data + buffer->size;
    for (Py_ssize_t i = 0; i < column->length; i++)
    {
        byte c = column->value[i];

        if (c == '\\' || (c < 14 && (c == '\t' || c == '\n' || c == '\r')))
        {
            *p++ = '\\';
            c = c == '\t' ? 't' : c == '\n' ? 'n' : c == '\r' ? 'r' : c;
        }
        *p++ = c;
    }
    buffer->size = p - buffer->data;
    return 1;
}

/* A row, which may be two: of cells, or of a change as it came. */
typedef struct
{
    Buffer     kept; /* where its columns are */
    Py_ssize_t number;
} Joined;

static inline Column *
columns_in(const Joined *row)
{
    return (Column *) row->kept.data;
}

static int
read_cells(PyObject *cells, Joined *row)
{
    row->number = PyList_GET_SIZE(cells);
    if (!make_room(&row->kept, row->number * (Py_ssize_t) sizeof(Column)))
        return 0;
    for (Py_ssize_t i = 0; i < row->number; i++)
    {
        PyObject *cell = PyList_GET_ITEM(cells, i);
        Column   *column = &columns_in(row)[i];

        column->status = 'u';
        if (cell == Py_None)
            continue;
        if (!PyBytes_CheckExact(cell) || PyBytes_GET_SIZE(cell) < 4)
            return 0;
        column->value = (const byte *) PyBytes_AS_STRING(cell) + 4;
        column->length = PyBytes_GET_SIZE(cell) - 4;
        column->status = column->length == 0 && memcmp(column->value - 4, "\xff\xff\xff\xff", 4) == 0 ? 'n' : 'v';
    }
    return 1;
}

/* 0 where it is neither, or not one of values of `form`. */
static int
read_joined(PyObject *given, int form, Joined *row)
{
    const byte *first, *end;
    Py_ssize_t  ncols;

    if (PyList_CheckExact(given))
        return read_cells(given, row);
    if (!PyBytes_CheckExact(given) || PyBytes_GET_SIZE(given) < VALUES)
        return 0;
    first = (const byte *) PyBytes_AS_STRING(given);
    end = first + PyBytes_GET_SIZE(given);
    ncols = uint16_at(first + VALUES - 2);
    if (ncols == 0 || !make_room(&row->kept, 2 * ncols * (Py_ssize_t) sizeof(Column)))
        return 0;
    for (Py_ssize_t rows = 1; rows <= 2; rows++)
        if (read_rows(first + VALUES, end, ncols, rows, form, columns_in(row)))
        {
            row->number = rows * ncols;
            return 1;
        }
    return 0;
}

/* (rows, form) */
static PyObject *
row_encoding_copy_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t form;
    Joined     row = {0};
    Buffer     buffer = {0};
    PyObject  *found = NULL;
    int        goes_on = 1;

    if (nargs != 2 || !PyList_CheckExact(args[0]) || !as_size(args[1], &form) || (form != 't' && form != 'b'))
        return defer("row_encoding_copy_rows", args, nargs);
    for (Py_ssize_t i = 0; goes_on && i < PyList_GET_SIZE(args[0]); i++)
    {
        goes_on = read_joined(PyList_GET_ITEM(args[0], i), (int) form, &row) && row.number <= 0xFFFF;
        if (goes_on && form == 'b')
            goes_on = put(&buffer, (byte[]){row.number >> 8 & 0xFF, row.number & 0xFF}, 2);
        for (Py_ssize_t j = 0; goes_on && j < row.number; j++)
            goes_on = columns_in(&row)[j].status != 'u' &&
                (form == 'b' ? put_cell(&buffer, &columns_in(&row)[j])
                             : put_text(&buffer, &columns_in(&row)[j]) && put(&buffer, j + 1 < row.number ? "\t" : "\n", 1));
        goes_on = goes_on && row.number > 0;
    }
    if (goes_on)
        found = PyBytes_FromStringAndSize((const char *) buffer.data, buffer.size);
    PyMem_Free(buffer.data);
    PyMem_Free(row.kept.data);
    return found != NULL ? found : defer("row_encoding_copy_rows", args, nargs);
}

/* The places of a sequence; the number of them, or -1. */
static Py_ssize_t
read_places(PyObject *given, Py_ssize_t **places)
{
    Py_ssize_t number = PyList_CheckExact(given) ? PyList_GET_SIZE(given) : -1;

    *places = number > 0 ? PyMem_New(Py_ssize_t, number) : NULL;
    for (Py_ssize_t i = 0; *places != NULL && i < number; i++)
    {
        PyObject *place = PyList_GET_ITEM(given, i);

        (*places)[i] = PyLong_CheckExact(place) ? PyLong_AsSsize_t(place) : 0;
        if ((*places)[i] >= 0 || (*places)[i] < -4 * 0xFFFF || PyErr_Occurred())
            number = -1;
        PyErr_Clear(); /* it does not fit */
    }
    return *places != NULL ? number : -1;
}

/* Add the cells of a row at `places` to `buffers`. */
static int
put_columns(Buffer *buffers, const Joined *row, const Py_ssize_t *places, Py_ssize_t number)
{
    for (Py_ssize_t i = 0; i < number; i++)
    {
        Py_ssize_t place = row->number + places[i];

        if (place < 0 || columns_in(row)[place].status == 'u' || !put_cell(&buffers[i], &columns_in(row)[place]))
            return 0;
    }
    return 1;
}

/* (rows, places, form) */
static PyObject *
row_encoding_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t *places = NULL, number, form;
    Joined      row = {0};
    Buffer     *buffers = NULL;
    PyObject   *found = NULL;
    int         goes_on;

    if (nargs != 3 || !PyList_CheckExact(args[0]) || !as_size(args[2], &form) || (form != 't' && form != 'b'))
        return defer("row_encoding_columns", args, nargs);
    number = read_places(args[1], &places);
    buffers = number > 0 ? PyMem_Calloc(number, sizeof(Buffer)) : NULL;
    goes_on = buffers != NULL;
    for (Py_ssize_t i = 0; goes_on && i < PyList_GET_SIZE(args[0]); i++)
        goes_on = read_joined(PyList_GET_ITEM(args[0], i), (int) form, &row) && put_columns(buffers, &row, places, number);
    if (goes_on)
        found = PyList_New(number);
    for (Py_ssize_t i = 0; buffers != NULL && i < number; i++)
    {
        PyObject *column =
            found != NULL ? PyBytes_FromStringAndSize((const char *) buffers[i].data, buffers[i].size) : NULL;

        if (column != NULL)
            PyList_SET_ITEM(found, i, column);
        else
            Py_CLEAR(found);
        PyMem_Free(buffers[i].data);
    }
    PyMem_Free(buffers);
    PyMem_Free(places);
    PyMem_Free(row.kept.data);
    return found != NULL ? found : defer("row_encoding_columns", args, nargs);
}
