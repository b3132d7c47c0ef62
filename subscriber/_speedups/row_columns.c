/* Rows of the change log by column, in the layout of Arrow's arrays. */

#define ROW_HEAD 8 /* letter, relid, marker, number of columns */
#define UNIX_EPOCH 946684800000000LL /* PostgreSQL's, in microseconds since 1970 */

/* --- which rows there are ------------------------------------------------------------------------------ */

/* FoundRows in Python: what is added to its bytearrays. */
enum { STARTS, KINDS, OPS, LSNS, TIMES, XIDS, NUMBERS, FIELDS };

typedef struct
{
    Buffer   fields[FIELDS];
    int      open; /* a transaction whose rows are wanted */
    int64_t  lsn, time, xid, number;
    uint32_t relid; /* the last one; its kind */
    int64_t  kind;
    int      known;
} Finding;

static int
read_transaction(PyObject *given, Finding *finding)
{
    int64_t *numbers[] = {&finding->lsn, &finding->time, &finding->xid, &finding->number};

    finding->open = given != Py_None;
    if (!finding->open)
        return 1;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4)
        return 0;
    for (int i = 0; i < 4; i++)
    {
        PyObject *number = PyTuple_GET_ITEM(given, i);

        if (!PyLong_Check(number))
            return 0;
        *numbers[i] = PyLong_AsLongLong(number);
        if (*numbers[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return finding->number >= 0 && finding->number <= INT64_MAX / 2;
}

/* Find the kind of a relation; 0 if it is not described, or with an error. */
static int
find_kind(Finding *finding, PyObject *kinds, uint32_t relid)
{
    PyObject *key, *kind;

    if (finding->known && finding->relid == relid)
        return 1;
    key = PyLong_FromUnsignedLong(relid);
    if (key == NULL)
        return 0;
    kind = PyDict_GetItemWithError(kinds, key);
    Py_DECREF(key);
    if (kind == NULL || !PyLong_Check(kind))
        return 0;
    finding->kind = PyLong_AsLongLong(kind);
    if (finding->kind > INT32_MAX || PyErr_Occurred())
        return 0;
    finding->relid = relid;
    finding->known = 1;
    return 1;
}

static int
add_row(Finding *finding, int64_t start, byte letter)
{
    int32_t kind = (int32_t) finding->kind;
    byte    op = letter == 'I' ? 'c' : letter == 'U' ? 'u' : 'd';
    int64_t numbers[] = {finding->lsn, finding->time, finding->xid, finding->number};

    for (int i = LSNS; i < FIELDS; i++)
        if (!put(&finding->fields[i], &numbers[i - LSNS], 8))
            return 0;
    return put(&finding->fields[STARTS], &start, 8) && put(&finding->fields[KINDS], &kind, 4) &&
        put(&finding->fields[OPS], &op, 1);
}

/* 0 if the message is not a whole BEGIN, or not one of a wanted range. */
static int
open_transaction(Finding *finding, const byte *message, Py_ssize_t length, uint64_t after, uint64_t upto)
{
    uint64_t lsn;

    if (length != BEGIN_SIZE)
        return 0;
    lsn = uint64_at(message + 1);
    if (lsn == 0 || lsn >= upto || lsn > INT64_MAX ||
        __builtin_add_overflow((int64_t) uint64_at(message + 9), (int64_t) UNIX_EPOCH, &finding->time))
        return 0;
    finding->open = lsn >= after;
    finding->lsn = (int64_t) lsn;
    finding->xid = uint32_at(message + 17);
    finding->number = 0;
    return 1;
}

/* The position after the message at `p`, or `p` if the search ends before it; NULL with an error. */
static const byte *
find_row(Finding *finding, const byte *first, const byte *p, const byte *end, PyObject *kinds, uint64_t after, uint64_t upto)
{
    const byte *message = p + 4;
    uint32_t    length;

    if (end - p < 5)
        return p;
    length = uint32_at(p);
    if (length == 0 || (uint64_t) (end - message) < length)
        return p;
    switch (*message)
    {
        case 'I':
        case 'U':
        case 'D':
            if (!finding->open)
                break;
            if (length < 5 || !find_kind(finding, kinds, uint32_at(message + 1)))
                return PyErr_Occurred() ? NULL : p;
            if (finding->kind >= 0 && !add_row(finding, message - first, *message))
                return (const byte *) PyErr_NoMemory();
            finding->number++;
            break;
        case 'B':
            if (!open_transaction(finding, message, length, after, upto))
                return p;
            break;
        case 'C':
            finding->open = 0;
            break;
        default:
            return p;
    }
    return message + length;
}

static int
extend(PyObject *bytes, const Buffer *more)
{
    Py_ssize_t before = PyByteArray_GET_SIZE(bytes);

    if (more->size == 0)
        return 1;
    if (PyByteArray_Resize(bytes, before + more->size) < 0)
        return 0;
    memcpy(PyByteArray_AS_STRING(bytes) + before, more->data, more->size);
    return 1;
}

static int
is_found_rows(PyObject *given)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != FIELDS)
        return 0;
    for (int i = 0; i < FIELDS; i++)
        if (!PyByteArray_CheckExact(PyTuple_GET_ITEM(given, i)))
            return 0;
    return 1;
}

/* (body, position, transaction, kinds, after, upto, found). The reference gets the rest from the first BEGIN on that is
   not whole, which is where this one ends; so it raises what there is to raise. */
static PyObject *
row_columns_find_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Finding     finding = {0};
    Py_ssize_t  position;
    uint64_t    after, upto;
    const byte *first, *p, *end, *next = NULL;
    PyObject   *result = NULL;

    if (nargs != 7 || !PyBytes_CheckExact(args[0]) || !as_size(args[1], &position) ||
        position > PyBytes_GET_SIZE(args[0]) || !read_transaction(args[2], &finding) || !PyDict_CheckExact(args[3]) ||
        !PyLong_Check(args[4]) || !PyLong_Check(args[5]) || !is_found_rows(args[6]))
        return defer("row_columns_find_rows", args, nargs);
    after = PyLong_AsUnsignedLongLong(args[4]);
    upto = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred())
        return defer("row_columns_find_rows", args, nargs);
    first = (const byte *) PyBytes_AS_STRING(args[0]);
    end = first + PyBytes_GET_SIZE(args[0]);
    for (p = first + position; p < end; p = next)
    {
        next = find_row(&finding, first, p, end, args[3], after, upto);
        if (next == NULL)
            goto done;
        if (next == p)
            break;
    }
    for (int i = 0; i < FIELDS; i++)
        if (!extend(PyTuple_GET_ITEM(args[6], i), &finding.fields[i]))
            goto done;
    result = finding.open ? Py_BuildValue("n(LLLL)", p - first, finding.lsn, finding.time, finding.xid, finding.number)
                          : Py_BuildValue("nO", p - first, Py_None);
    if (result != NULL && p < end && end - p > 4 && p[4] == 'B')
    {
        /* A BEGIN that was not taken: outside of the range, which the reference finds too, or damaged. */
        PyObject *again[] = {args[0], PyTuple_GET_ITEM(result, 0), PyTuple_GET_ITEM(result, 1), args[3], args[4], args[5], args[6]};
        PyObject *rest = PyObject_Vectorcall(reference("row_columns_find_rows"), again, 7, NULL);

        Py_SETREF(result, rest);
    }
done:
    for (int i = 0; i < FIELDS; i++)
        PyMem_Free(finding.fields[i].data);
    return result;
}

/* --- numbers of rows ----------------------------------------------------------------------------------- */

static inline int64_t
int64_in(const Py_buffer *numbers, Py_ssize_t i)
{
    int64_t found;

    memcpy(&found, (const byte *) numbers->buf + 8 * i, 8);
    return found;
}

static inline int32_t
int32_in(const Py_buffer *numbers, Py_ssize_t i)
{
    int32_t found;

    memcpy(&found, (const byte *) numbers->buf + 4 * i, 4);
    return found;
}

static char *
put_hex(char *at, uint64_t number, int digits)
{
    for (int i = digits - 1; i >= 0; i--, number >>= 4)
        at[i] = "0123456789ABCDEF"[number & 0xF];
    return at + digits;
}

#define LSN_DIGITS 16
#define NUMBER_DIGITS 10

/* (lsns, numbers) */
static PyObject *
row_columns_sequence_numbers(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer lsns = {0}, numbers = {0};
    PyObject *found = NULL;

    if (nargs == 2 && PyObject_GetBuffer(args[0], &lsns, PyBUF_SIMPLE) == 0 &&
        PyObject_GetBuffer(args[1], &numbers, PyBUF_SIMPLE) == 0 && lsns.len == numbers.len && lsns.len % 8 == 0)
    {
        Py_ssize_t rows = lsns.len / 8;
        char      *at;

        found = PyBytes_FromStringAndSize(NULL, rows * (LSN_DIGITS + NUMBER_DIGITS));
        at = found == NULL ? NULL : PyBytes_AS_STRING(found);
        for (Py_ssize_t i = 0; found != NULL && i < rows; i++)
        {
            int64_t lsn = int64_in(&lsns, i), number = int64_in(&numbers, i);

            if (lsn < 0 || number < 0 || number >> 4 * NUMBER_DIGITS)
                Py_CLEAR(found);
            else
                at = put_hex(put_hex(at, (uint64_t) lsn, LSN_DIGITS), (uint64_t) number, NUMBER_DIGITS);
        }
    }
    PyBuffer_Release(&lsns);
    PyBuffer_Release(&numbers);
    return found != NULL ? found : defer("row_columns_sequence_numbers", args, nargs);
}

/* --- their values -------------------------------------------------------------------------------------- */

/* One bit for each row. */
typedef struct
{
    PyObject  *bits; /* bytes */
    Py_ssize_t nulls;
} Present;

/* A column of the result. */
typedef struct
{
    Present   present;
    PyObject *offsets; /* bytes */
    Buffer    data;
} Output;

/* Before or after. */
typedef struct
{
    Present present;
    Output *columns;
} Side;

typedef struct
{
    Py_ssize_t  number, width, wanted;
    Py_ssize_t *sources; /* -1: a fill */
    PyObject   *fills;   /* a tuple or list */
    Column     *old, *new;
    Side        before, after;
    Output      unsent;
    int         any_unsent;
} Gathering;

static int
new_present(Present *present, Py_ssize_t number)
{
    present->bits = PyBytes_FromStringAndSize(NULL, (number + 7) / 8);
    if (present->bits == NULL)
        return 0;
    memset(PyBytes_AS_STRING(present->bits), 0, (number + 7) / 8);
    return 1;
}

static inline void
mark(Present *present, Py_ssize_t row, int is_there)
{
    if (is_there)
        PyBytes_AS_STRING(present->bits)[row / 8] |= (char) (1 << row % 8);
    else
        present->nulls++;
}

static int
new_output(Output *output, Py_ssize_t number)
{
    if (!new_present(&output->present, number))
        return 0;
    output->offsets = PyBytes_FromStringAndSize(NULL, (number + 1) * 4);
    if (output->offsets == NULL)
        return 0;
    memset(PyBytes_AS_STRING(output->offsets), 0, 4);
    return 1;
}

/* End the value of a row, the number of whose bytes or indexes is `end`; 0 if offsets cannot express it. */
static inline int
end_row(Output *output, Py_ssize_t row, Py_ssize_t end)
{
    int32_t offset = (int32_t) end;

    if (end > INT32_MAX)
        return 0;
    memcpy(PyBytes_AS_STRING(output->offsets) + (row + 1) * 4, &offset, 4);
    return 1;
}

static inline int
put_value(Output *output, Py_ssize_t row, const byte *value, Py_ssize_t length)
{
    mark(&output->present, row, value != NULL);
    return (length == 0 || put(&output->data, value, length)) && end_row(output, row, output->data.size);
}

static inline int
has_value(const Column *column)
{
    return column->status == 't' || column->status == 'b';
}

static int
put_side(Gathering *g, Side *side, Py_ssize_t row, const Column *columns, int is_key, const Column *whole)
{
    mark(&side->present, row, columns != NULL);
    for (Py_ssize_t i = 0; i < g->wanted; i++)
    {
        Py_ssize_t  source = g->sources[i], length = 0;
        const byte *value = NULL;

        if (columns != NULL && source >= 0)
        {
            const Column *column = &columns[source];

            if (column->status == 'u' && side == &g->after)
            {
                int32_t index = (int32_t) i;

                if (whole != NULL)
                    column = &whole[source];
                else if (!put(&g->unsent.data, &index, 4))
                    return 0;
            }
            if (has_value(column))
                value = column->value, length = column->length;
        }
        else if (columns != NULL && !is_key && PyList_GET_ITEM(g->fills, i) != Py_None)
        {
            value = (const byte *) PyBytes_AS_STRING(PyList_GET_ITEM(g->fills, i));
            length = PyBytes_GET_SIZE(PyList_GET_ITEM(g->fills, i));
        }
        if (!put_value(&side->columns[i], row, value, length))
            return 0;
    }
    return 1;
}

/* Read the columns of a row at *at, behind its marker. */
static int
read_width(const byte **at, const byte *end, Py_ssize_t width, Column *columns)
{
    if (end - *at < 2 || uint16_at(*at) != width)
        return 0;
    *at += 2;
    for (Py_ssize_t i = 0; i < width; i++)
        if (!next_column(at, end, &columns[i]))
            return 0;
    return 1;
}

/* Gather the row whose message is between `p` and `end`; 0 if it is not one, or with an error. */
static int
gather_row(Gathering *g, Py_ssize_t row, const byte *p, const byte *end)
{
    Column    *old = NULL, *new = NULL;
    Py_ssize_t before = g->unsent.data.size;
    byte       letter, marker;

    if (end - p < ROW_HEAD)
        return 0;
    letter = *p;
    marker = p[5];
    p += 6;
    if (letter != 'I' && letter != 'U' && letter != 'D')
        return 0;
    if (letter != 'I' && (marker == 'K' || marker == 'O'))
    {
        old = g->old;
        if (!read_width(&p, end, g->width, old))
            return 0;
        if (letter == 'U' && (end - p < 1 || *p++ != 'N'))
            return 0;
    }
    else if (letter == 'D' || marker != 'N')
        return 0;
    if (letter != 'D')
    {
        new = g->new;
        if (!read_width(&p, end, g->width, new))
            return 0;
    }
    if (p != end || !put_side(g, &g->before, row, old, marker == 'K', NULL) ||
        !put_side(g, &g->after, row, new, 0, marker == 'O' ? old : NULL))
        return 0;
    mark(&g->unsent.present, row, g->unsent.data.size > before);
    g->any_unsent |= g->unsent.data.size > before;
    return end_row(&g->unsent, row, g->unsent.data.size / 4);
}

static int
new_side(Side *side, const Gathering *g)
{
    side->columns = PyMem_Calloc(g->wanted + 1, sizeof(Output));
    if (side->columns == NULL || !new_present(&side->present, g->number))
        return 0;
    for (Py_ssize_t i = 0; i < g->wanted; i++)
        if (!new_output(&side->columns[i], g->number))
            return 0;
    return 1;
}

static void
free_output(Output *output)
{
    Py_XDECREF(output->present.bits);
    Py_XDECREF(output->offsets);
    PyMem_Free(output->data.data);
}

static void
free_gathering(Gathering *g)
{
    Side *sides[] = {&g->before, &g->after};

    for (int i = 0; i < 2; i++)
    {
        Py_XDECREF(sides[i]->present.bits);
        for (Py_ssize_t j = 0; sides[i]->columns != NULL && j < g->wanted; j++)
            free_output(&sides[i]->columns[j]);
        PyMem_Free(sides[i]->columns);
    }
    free_output(&g->unsent);
    PyMem_Free(g->sources);
    PyMem_Free(g->old);
    PyMem_Free(g->new);
    Py_XDECREF(g->fills);
}

static PyObject *
cells_of_output(const Output *output)
{
    return Py_BuildValue(
        "(nO)Oy#", output->present.nulls, output->present.bits, output->offsets,
        output->data.data == NULL ? "" : (const char *) output->data.data, output->data.size);
}

static PyObject *
columns_of_side(const Side *side, Py_ssize_t wanted)
{
    PyObject *found = PyList_New(wanted);

    for (Py_ssize_t i = 0; found != NULL && i < wanted; i++)
    {
        PyObject *cells = cells_of_output(&side->columns[i]);

        if (cells == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, cells);
    }
    return found;
}

/* Read width, sources and fills; 0 if they are others. */
static int
read_placement(PyObject *width, PyObject *sources, PyObject *fills, Gathering *g)
{
    if (!as_size(width, &g->width) || g->width > 0xFFFF || !(PyTuple_CheckExact(sources) || PyList_CheckExact(sources)) ||
        !(PyTuple_CheckExact(fills) || PyList_CheckExact(fills)))
        return 0;
    g->wanted = PySequence_Fast_GET_SIZE(sources);
    g->fills = PySequence_List(fills);
    g->sources = PyMem_New(Py_ssize_t, g->wanted + 1);
    g->old = PyMem_New(Column, g->width + 1);
    g->new = PyMem_New(Column, g->width + 1);
    if (g->fills == NULL || g->sources == NULL || g->old == NULL || g->new == NULL ||
        PyList_GET_SIZE(g->fills) != g->wanted)
        return 0;
    for (Py_ssize_t i = 0; i < g->wanted; i++)
    {
        PyObject *source = PySequence_Fast_GET_ITEM(sources, i), *fill = PyList_GET_ITEM(g->fills, i);

        if (!PyLong_CheckExact(source) || (fill != Py_None && !PyBytes_CheckExact(fill)))
            return 0;
        g->sources[i] = PyLong_AsSsize_t(source);
        if (g->sources[i] >= g->width || (g->sources[i] == -1 && PyErr_Occurred()))
            return 0;
    }
    return 1;
}

/* Gather the rows of `kind`; 0 if that is left to the reference. */
static int
gather(Gathering *g, PyObject *body, const Py_buffer *starts, const Py_buffer *kinds, int32_t kind)
{
    const byte *first = (const byte *) PyBytes_AS_STRING(body);
    Py_ssize_t  size = PyBytes_GET_SIZE(body), rows = kinds->len / 4, row = 0;

    if (starts->len != rows * 8 || kinds->len % 4 != 0)
        return 0;
    for (Py_ssize_t i = 0; i < rows; i++)
        g->number += int32_in(kinds, i) == kind;
    if (!new_side(&g->before, g) || !new_side(&g->after, g) || !new_output(&g->unsent, g->number))
        return 0;
    for (Py_ssize_t i = 0; i < rows; i++)
    {
        int64_t  start = int64_in(starts, i);
        uint32_t length;

        if (int32_in(kinds, i) != kind)
            continue;
        if (start < 0)
        {
            mark(&g->unsent.present, row, 0);
            if (!put_side(g, &g->before, row, NULL, 0, NULL) || !put_side(g, &g->after, row, NULL, 0, NULL) ||
                !end_row(&g->unsent, row, g->unsent.data.size / 4))
                return 0;
            row++;
            continue;
        }
        if (start < 4 || start > size)
            return 0;
        length = uint32_at(first + start - 4);
        if ((uint64_t) (size - start) < length || !gather_row(g, row, first + start, first + start + length))
            return 0;
        row++;
    }
    return 1;
}

/* (body, starts, kinds, kind, width, sources, fills) */
static PyObject *
row_columns_gather_columns(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Gathering  g = {0};
    Py_buffer  starts = {0}, kinds = {0};
    Py_ssize_t kind;
    PyObject  *found = NULL;

    if (nargs == 7 && PyBytes_CheckExact(args[0]) && as_size(args[3], &kind) && kind <= INT32_MAX &&
        PyObject_GetBuffer(args[1], &starts, PyBUF_SIMPLE) == 0 && PyObject_GetBuffer(args[2], &kinds, PyBUF_SIMPLE) == 0 &&
        read_placement(args[4], args[5], args[6], &g) && gather(&g, args[0], &starts, &kinds, (int32_t) kind))
    {
        PyObject *before = columns_of_side(&g.before, g.wanted), *after = columns_of_side(&g.after, g.wanted);
        PyObject *unsent = g.any_unsent ? cells_of_output(&g.unsent) : Py_NewRef(Py_None);

        if (before != NULL && after != NULL && unsent != NULL)
            found = Py_BuildValue(
                "n(nO)O(nO)OO", g.number, g.before.present.nulls, g.before.present.bits, before, g.after.present.nulls,
                g.after.present.bits, after, unsent);
        Py_XDECREF(before);
        Py_XDECREF(after);
        Py_XDECREF(unsent);
    }
    PyBuffer_Release(&starts);
    PyBuffer_Release(&kinds);
    free_gathering(&g);
    return found != NULL ? found : defer("row_columns_gather_columns", args, nargs);
}

/* --- lines of COPY -------------------------------------------------------------------------------------- */

/* The byte that a letter behind a backslash stands for; -1 if the reference has to know. */
static inline int
escaped_byte(byte letter)
{
    switch (letter)
    {
        case 'b': return '\b';
        case 'f': return '\f';
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        case 'v': return '\v';
        case '\\': return '\\';
        default: return -1;
    }
}

/* Add the field between `p` and `end` as the value of a row; 0 if that is left to the reference. */
static int
put_field(Output *output, Py_ssize_t row, const byte *p, const byte *end)
{
    byte *at;

    if (end - p == 2 && p[0] == '\\' && p[1] == 'N')
        return put_value(output, row, NULL, 0);
    if (memchr(p, '\\', end - p) == NULL)
        return put_value(output, row, p, end - p);
    if (!make_room(&output->data, end - p))
        return 0;
    at = output->data.data + output->data.size;
    while (p < end)
    {
        int found = *p++;

        if (found == '\\')
        {
            found = p < end ? escaped_byte(*p++) : -1;
            if (found < 0)
                return 0;
        }
        *at++ = (byte) found;
    }
    output->data.size = at - output->data.data;
    mark(&output->present, row, 1);
    return end_row(output, row, output->data.size);
}

/* Add the line between `p` and `end`; 0 if it does not have `width` fields: its last one has no tab. */
static int
put_line(Output *columns, Py_ssize_t width, Py_ssize_t row, const byte *p, const byte *end)
{
    for (Py_ssize_t i = 0; i < width; i++)
    {
        const byte *tab = i + 1 < width ? memchr(p, '\t', end - p) : end;

        if (tab == NULL || (tab == end && memchr(p, '\t', end - p) != NULL) || !put_field(&columns[i], row, p, tab))
            return 0;
        p = tab + 1;
    }
    return 1;
}

/* (data, width) */
static PyObject *
row_columns_split_lines(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t  width, rows = 0, row = 0;
    const byte *p, *end, *newline;
    Side        side = {0};
    PyObject   *found = NULL;
    int         goes_on;

    if (nargs != 2 || !PyBytes_CheckExact(args[0]) || !as_size(args[1], &width) || width == 0 || width > 0xFFFF)
        return defer("row_columns_split_lines", args, nargs);
    p = (const byte *) PyBytes_AS_STRING(args[0]);
    end = p + PyBytes_GET_SIZE(args[0]);
    for (const byte *at = p; (at = memchr(at, '\n', end - at)) != NULL; at++)
        rows++;
    side.columns = PyMem_Calloc(width, sizeof(Output));
    goes_on = side.columns != NULL;
    for (Py_ssize_t i = 0; goes_on && i < width; i++)
        goes_on = new_output(&side.columns[i], rows);
    while (goes_on && p < end)
    {
        newline = memchr(p, '\n', end - p);
        goes_on = newline != NULL && put_line(side.columns, width, row++, p, newline);
        p = goes_on ? newline + 1 : end;
    }
    if (goes_on)
        found = columns_of_side(&side, width);
    for (Py_ssize_t i = 0; side.columns != NULL && i < width; i++)
        free_output(&side.columns[i]);
    PyMem_Free(side.columns);
    return found != NULL ? found : defer("row_columns_split_lines", args, nargs);
}

/* --- bytea ---------------------------------------------------------------------------------------------- */

/* Without a branch, which digits of random bytes would mispredict: the value, or more than 15. */
static inline unsigned
hex_digit(byte c)
{
    unsigned is_number = (byte) (c - '0') < 10, is_letter = (byte) ((c | 0x20) - 'a') < 6;

    return ((c & 0xF) + 9 * is_letter) | (1 - (is_number | is_letter)) << 8;
}

/* Add the bytes of the value between `p` and `end` at *at; 0 if it is not \x and pairs of digits. */
static int
unhex(const byte *p, const byte *end, byte **at)
{
    unsigned found, all = 0;

    p += end - p < 2 ? end - p : 2;
    if ((end - p) % 2 != 0)
        return 0;
    for (; p < end; p += 2)
    {
        found = hex_digit(p[0]) << 4 | hex_digit(p[1]);
        all |= found;
        *(*at)++ = (byte) found;
    }
    return all < 256;
}

/* (offsets, data) */
static PyObject *
row_columns_unhex_values(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer offsets = {0}, data = {0};
    PyObject *ends = NULL, *found = NULL;
    Py_ssize_t size = -1;

    if (nargs == 2 && PyObject_GetBuffer(args[0], &offsets, PyBUF_SIMPLE) == 0 &&
        PyObject_GetBuffer(args[1], &data, PyBUF_SIMPLE) == 0 && offsets.len >= 4 && offsets.len % 4 == 0)
    {
        ends = PyBytes_FromStringAndSize(NULL, offsets.len);
        found = PyBytes_FromStringAndSize(NULL, data.len / 2);
        if (ends != NULL && found != NULL)
        {
            byte *first = (byte *) PyBytes_AS_STRING(found), *at = first;

            memset(PyBytes_AS_STRING(ends), 0, 4);
            size = 0;
            for (Py_ssize_t i = 1; size >= 0 && i < offsets.len / 4; i++)
            {
                int32_t start = int32_in(&offsets, i - 1), end = int32_in(&offsets, i);

                /* Values follow one another, so the bytes of all of them have room. */
                if (start < 0 || end < start || end > data.len || (i == 1 && start != 0) ||
                    !unhex((const byte *) data.buf + start, (const byte *) data.buf + end, &at))
                    size = -1;
                else
                {
                    int32_t offset = (int32_t) (at - first);

                    memcpy(PyBytes_AS_STRING(ends) + 4 * i, &offset, 4);
                    size = at - first;
                }
            }
        }
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    if (size >= 0 && _PyBytes_Resize(&found, size) == 0)
        return Py_BuildValue("NN", ends, found);
    Py_XDECREF(ends);
    Py_XDECREF(found);
    return defer("row_columns_unhex_values", args, nargs);
}
