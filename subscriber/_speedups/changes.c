/*
 * Rows and changes of a consumer: rows.RowData, changes.RowChange and what makes them of frames.
 *
 * They have no reference to anything that could refer back to them, so they are not known to the garbage collector,
 * which would look at each of a million objects to find that out.
 */

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
    .tp_name = "subscriber._speedups._native.rows_RowData",
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
    .tp_name = "subscriber._speedups._native.changes_RowChange",
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

#define LAST_LETTER 0xFF /* where a message begins at the latest, behind its envelope */

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
        !PyList_CheckExact(args[3]) || !as_size(args[4], &making.letter) || making.letter > LAST_LETTER ||
        !PyTuple_CheckExact(args[6]) || PyTuple_GET_SIZE(args[6]) != 4)
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
