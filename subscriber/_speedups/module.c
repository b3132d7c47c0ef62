/*
 * The innermost loops in C: what arrived is cut into messages, messages into rows, rows into values.
 *
 * Everything here stands in for a Python function or class marked @compiled (__init__.py) and has its name, with the
 * module's in front. That one is the reference: it has the documentation, and runs where this was not built. Here is
 * the good case only. Whatever is damaged, unusual or out of range is left to the reference, which raises what there
 * is to raise, so that the two cannot disagree about errors. Two rules make that safe:
 *
 *   - no byte is read before its place has been compared with the end (next_column() in bytes.h);
 *   - nothing that the caller can see is changed before a row, or a message, is known to be good.
 *
 * The files are one for the compiler: what they have in common can be inlined, and nothing but the module is seen outside.
 */

#include "bytes.h"

#include "values.c"
#include "changes.c"
#include "columns.c"
#include "row_extraction.c"
#include "row_encoding.c"
#include "row_columns.c"

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
    FUNCTION(frontend_cut_copy_data),
    FUNCTION(copy_data_weigh),
    FUNCTION(tuple_data_skip_columns),
    FUNCTION(tuple_data_split_columns),
    FUNCTION(row_extraction_extract_row),
    FUNCTION(row_extraction_extract_keys),
    FUNCTION(row_extraction_extract_changes),
    FUNCTION(row_encoding_copy_rows),
    FUNCTION(row_encoding_columns),
    FUNCTION(row_columns_find_rows),
    FUNCTION(row_columns_sequence_numbers),
    FUNCTION(row_columns_gather_columns),
    FUNCTION(row_columns_split_lines),
    FUNCTION(row_columns_unhex_values),
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "subscriber._speedups._native",
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
    null_cell = PyBytes_FromStringAndSize("\xff\xff\xff\xff", 4);
    if (null_cell == NULL || decimal_type == NULL || references == NULL || name_plan == NULL || name_dict == NULL)
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
