/* Values: the bytes of one, in text or binary, as a Python object. */

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
    .tp_name = "subscriber._speedups._native.Value",
    .tp_basicsize = sizeof(Value),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Value, call),
    .tp_call = PyVectorcall_Call,
    .tp_repr = value_repr,
};

static PyObject *
text_text(const byte *p, Py_ssize_t n)
{
    return PyUnicode_DecodeUTF8((const char *) p, n, "surrogateescape");
}

static PyObject *
text_boolean(const byte *p, Py_ssize_t n)
{
    return PyBool_FromLong(n == 1 && *p == 't');
}

static PyObject *
text_integer(const byte *p, Py_ssize_t n)
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
text_float8(const byte *p, Py_ssize_t n)
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
text_numeric(const byte *p, Py_ssize_t n)
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
text_parse_date(const byte *p, Py_ssize_t n)
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
text_timestamp(const byte *p, Py_ssize_t n)
{
    return timestamp_of(p, n, 0);
}

static PyObject *
text_timestamptz(const byte *p, Py_ssize_t n)
{
    return timestamp_of(p, n, 1);
}

static PyObject *
binary_boolean(const byte *p, Py_ssize_t n)
{
    return PyBool_FromLong(n == 1 && *p == 1);
}

static PyObject *
binary_integer(const byte *p, Py_ssize_t n)
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
binary_float8(const byte *p, Py_ssize_t n)
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
binary_numeric(const byte *p, Py_ssize_t n)
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
binary_timestamp(const byte *p, Py_ssize_t n)
{
    return binary_timestamp_of(p, n, Py_None);
}

static PyObject *
binary_timestamptz(const byte *p, Py_ssize_t n)
{
    return binary_timestamp_of(p, n, PyDateTime_TimeZone_UTC);
}

static PyObject *
binary_parse_date(const byte *p, Py_ssize_t n)
{
    int year, month, day;

    if (n != 4 || !date_of((int32_t) uint32_at(p), &year, &month, &day))
        return NULL;
    return PyDate_FromDate(year, month, day);
}

#define VALUE(name) {PyObject_HEAD_INIT(&ValueType) value_call, name, #name, NULL}

static Value values[] = {
    VALUE(text_text),
    VALUE(text_boolean),
    VALUE(text_integer),
    VALUE(text_float8),
    VALUE(text_numeric),
    VALUE(text_parse_date),
    VALUE(text_timestamp),
    VALUE(text_timestamptz),
    VALUE(binary_boolean),
    VALUE(binary_integer),
    VALUE(binary_float8),
    VALUE(binary_numeric),
    VALUE(binary_parse_date),
    VALUE(binary_timestamp),
    VALUE(binary_timestamptz),
};
