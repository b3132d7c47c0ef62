"""The types of columns in random tables, with boundary values of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

NULLS = 0.15  # how often a value is NULL

# In addition to those of tables.py.
TYPES = (
    "CREATE TYPE spans AS RANGE (subtype = text, multirange_type_name = many_spans)",
    "CREATE TYPE nested AS (p pair, n numeric, m mood)",
    "CREATE DOMAIN short AS varchar(5)",
    "CREATE DOMAIN numbers AS int[] CHECK (coalesce(array_length(VALUE, 1), 0) < 10)",
)


def _many_bytes(number: int, rows: int) -> str:
    """Hardly compressible."""
    return f"(SELECT string_agg(md5(({number} * g)::text), '') FROM generate_series(1, {rows}) g)"


@dataclass(frozen=True)
class Kind:
    """A type. No two of `values` are equal with a different text, because either of two equal rows may be changed.

    `alike` are such values, for tables whose rows have keys. `large` makes an expression of a long text.
    """

    type: str
    values: Sequence[str]  # SQL expressions
    alike: Sequence[str] = ()
    large: Callable[[str], str] | None = None
    equality: bool = True  # it has an operator, which a row without a key is found by
    binary: bool = True  # another server accepts the binary format

    def value(self, random: Random, *, keyed: bool) -> str:
        """Return a value as an SQL expression."""
        dice = random.random()
        if dice < NULLS:
            return "NULL"
        if self.large is not None and dice < NULLS + 0.2:
            return self.large(_many_bytes(random.randint(1, 5), random.choice([70, 300])))
        chosen = random.choice([*self.values, *self.alike] if keyed else self.values)
        return f"{chosen}::{self.type}"


KINDS = (
    Kind("smallint", ["0", "32767", "'-32768'"]),
    Kind("integer", ["0", "2147483647", "'-2147483648'"]),
    Kind("bigint", ["0", "9223372036854775807", "'-9223372036854775808'"]),
    Kind("numeric", ["0", "'NaN'", "'-Infinity'", "1e100", "1.10", "'-1e-25'"], ["1.1", "1.100", "0.00"]),
    Kind("numeric(12,3)", ["0", "'-999999999.999'", "0.001"]),
    Kind("real", ["0", "'NaN'", "'-Infinity'", "1.1", "1e-40"], ["'-0'"]),
    Kind("double precision", ["0", "'NaN'", "'Infinity'", "0.1", "1e-310", "(0.1::float8 + 0.2)"], ["'-0'"]),
    Kind("money", ["'12.34'", "'-92233720368547758.08'"]),
    Kind("boolean", ["true", "false"]),
    Kind(
        "text",
        ["''", "'NULL'", r"E'tab\tline\nend\\.'", "'ünïcødé 漢字 🐘'", "'it''s'", r"'\N'", "'\"'"],
        large=lambda text: text,
    ),
    Kind("varchar(8)", ["''", "'ab   '", "'Łódź'"]),
    Kind("char(5)", ["''", "'ab'", "'é'"]),
    Kind('"char"', ["'x'", "''", r"'\377'"]),
    Kind("name", ["''", "'a name'", "repeat('n', 63)"]),
    Kind("bytea", ["''", r"'\x00ff5c27'"], large=lambda text: f"convert_to({text}, 'UTF8')"),
    Kind("date", ["'infinity'", "'4713-01-01 BC'", "'2024-02-29'", "'5874897-12-31'"]),
    Kind("time", ["'24:00:00'", "'00:00'", "'12:34:56.789012'"]),
    Kind("timetz", ["'12:34:56.789+05:30'", "'24:00:00-15:59'", "'00:00+00'"]),
    Kind("timestamp", ["'infinity'", "'0044-03-15 12:00:00.123456 BC'", "'294276-12-31 23:59:59.999999'"]),
    Kind("timestamp(3)", ["'2024-06-01 12:00:00.1239'", "'-infinity'"]),
    Kind("timestamptz", ["'-infinity'", "'2024-06-01 12:00:00.5 America/New_York'", "'epoch'"]),
    Kind("interval", ["'1 year 2 mons -3 days 04:05:06.789'", "'-infinity'", "'0'"], ["'30 days'", "'1 mon'"]),
    Kind("uuid", ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "'00000000-0000-0000-0000-000000000000'"]),
    Kind(
        "json",
        ['\'{"a" : [1, null,  "x"], "a": 2 }\'', "'null'", "'\"\"'"],
        large=lambda text: f"json_build_object('k', {text})",
        equality=False,
    ),
    Kind(
        "jsonb",
        ['\'{"a" : [1, null,  "x\\u00e9"] }\'', "'null'", "'{}'", "'[]'"],
        ["'{\"n\": 1.0}'", "'{\"n\": 1.00}'"],
        large=lambda text: f"jsonb_build_object('k', {text})",
    ),
    Kind("jsonpath", ["'$.a[*] ? (@ > 1)'", "'$'"], equality=False),
    Kind("inet", ["'10.0.0.1/8'", "'::1'", "'0.0.0.0/0'"]),
    Kind("cidr", ["'10.0.0.0/8'", "'2001:db8::/32'"]),
    Kind("macaddr", ["'08:00:2b:01:02:03'", "'ff:ff:ff:ff:ff:ff'"]),
    Kind("macaddr8", ["'08:00:2b:01:02:03:04:05'"]),
    Kind("bit(4)", ["B'0101'", "B'0000'"]),
    Kind("varbit", ["B''", "B'1'", "repeat('10', 500)"]),
    Kind("varbit(6)", ["B''", "B'101'"]),
    Kind("point", ["'(1.5,-2)'", "'(NaN,Infinity)'"], equality=False),
    Kind("line", ["'{1,-1,0}'"], equality=False),
    Kind("lseg", ["'[(0,0),(1,1)]'"], equality=False),
    Kind("box", ["'(1,1),(0,0)'", "'(0,0),(0,0)'"], equality=False),
    Kind("path", ["'[(0,0),(1,1)]'", "'((0,0),(1,1),(2,0))'"], equality=False),
    Kind("polygon", ["'((0,0),(1,1),(1,0))'"], equality=False),
    Kind("circle", ["'<(0,0),2>'"], equality=False),
    Kind(
        "tsvector", ["'''fat'':1A ''cat'':2'", "''"], large=lambda text: f"to_tsvector('simple', {text}::varchar(2000))"
    ),
    Kind("tsquery", ["'fat & !cat'", "'a <-> b:*'"]),
    Kind("pg_lsn", ["'16/B374D848'", "'0/0'", "'FFFFFFFF/FFFFFFFF'"]),
    Kind("txid_snapshot", ["'10:20:10,14'"], equality=False),
    Kind("pg_snapshot", ["'10:20:10,14'", "'10:10:'"], equality=False),
    Kind("xid8", ["'18446744073709551615'", "'0'"]),
    Kind("xid", ["'4294967295'", "'3'"]),
    Kind("cid", ["'0'", "'7'"]),
    Kind("tid", ["'(0,1)'", "'(4294967295,65535)'"]),
    Kind("oid", ["4294967295", "0"]),
    Kind("oidvector", ["'1 2 4294967295'", "'0'"]),
    Kind("int2vector", ["'1 -2 3'", "'0'"]),
    # PostgreSQL refuses its own binary form of an empty one.
    Kind("tsquery", ["''"], binary=False),
    Kind("oidvector", ["''"], binary=False),
    Kind("int2vector", ["''"], binary=False),
    Kind("regtype", ["'integer'", "'-'", "'text[]'"]),
    Kind("refcursor", ["'c'", "''"], equality=False),
    Kind("aclitem", ["'=r/postgres'", "'postgres=arwdDxt/postgres'"], binary=False),
    Kind("xml", ["'<a b=\"c\">é</a>'", "''"], equality=False),
    Kind("int4range", ["'empty'", "'[1,5)'", "'(,)'", "'[,3)'"]),
    Kind("int8range", ["'empty'", "'[-9223372036854775808,9223372036854775807)'"]),
    Kind("numrange", ["'[1.5,2)'", "'(,NaN)'"], ["'[1.50,2.0)'"]),
    Kind("tsrange", ["'[2024-01-01,infinity]'", "'empty'"]),
    Kind("tstzrange", ["'[2024-01-01,2024-02-01)'", "'(,)'"]),
    Kind("daterange", ["'[2024-01-01,2024-02-01]'", "'(,)'"]),
    Kind("spans", ["'[a,\"b,c\")'", "'empty'", "'[\"\",)'"]),
    Kind("int4multirange", ["'{}'", "'{[1,3),[5,)}'"]),
    Kind("nummultirange", ["'{}'", "'{[1.5,2)}'"]),
    Kind("tstzmultirange", ["'{[2024-01-01,2024-02-01),[2024-03-01,)}'", "'{}'"]),
    Kind("many_spans", ["'{[a,b),[\"c d\",)}'", "'{}'"]),
    Kind(
        "int[]",
        ["'{}'", "'{1,NULL,3}'", "'[0:1][2:3]={{1,2},{3,4}}'"],
        large=lambda text: f"(SELECT array_agg(ascii(c)) FROM string_to_table({text}, NULL) c)",
    ),
    Kind("smallint[]", ["'{-32768,32767}'"]),
    Kind("text[]", ["ARRAY['a,b', '\"', 'NULL', NULL, '']", "'{}'"], large=lambda text: f"ARRAY[{text}, NULL]"),
    Kind("varchar(3)[]", ["'{abc,\"\"}'"]),
    Kind("char(2)[]", ["'{a,bc}'"]),
    Kind('"char"[]', ["'{a,b,\"\"}'"]),
    Kind("numeric[]", ["'{1.5,NaN,-Infinity}'"]),
    Kind("bytea[]", [r"ARRAY['\x00'::bytea, '']"]),
    Kind("boolean[]", ["'{t,NULL,f}'"]),
    Kind("float8[]", ["'{NaN,-Infinity,1e-310}'"]),
    Kind("timestamptz[]", ["'{epoch,infinity,NULL}'"]),
    Kind("interval[]", ["'{1 day,-1 sec}'"]),
    Kind("uuid[]", ["'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'"]),
    Kind("jsonb[]", ["ARRAY['{\"a\": 1}'::jsonb, 'null']"]),
    Kind("inet[]", ["'{10.0.0.1/8,::1}'"]),
    Kind("box[]", ["'{(1,1),(0,0);(2,2),(1,1)}'"], equality=False),
    Kind("point[]", ["'{\"(1,2)\"}'"], equality=False),
    Kind("int4range[]", ["'{empty,\"[1,5)\"}'"]),
    Kind("mood", ["'sad'", "'it''s'", "'happy'"]),
    Kind("small", ["1", "999", "'-2147483648'"]),
    Kind("short", ["''", "'abcde'"]),
    Kind("pair", ["ROW(1, 'a,\"b\"')", "ROW(NULL, NULL)", "ROW(2, '')"]),
    # Their binary formats contain the OID of a created type, which the other server does not have.
    Kind("nested", ["ROW(ROW(1, 'x'), 2.50, 'sad')", "ROW(NULL, NULL, 'ok')"], binary=False),
    Kind("numbers", ["'{1,2}'", "'{}'"]),
    Kind("mood[]", ["'{sad,happy,NULL}'", "'{}'"], binary=False),
    Kind("small[]", ["'{1,2}'"], binary=False),
    Kind("pair[]", ["ARRAY[ROW(1, 'x')::pair, NULL]"], binary=False),
    Kind("spans[]", ["'{\"[a,b)\"}'"], binary=False),
)


def _numbered(expression: str) -> Callable[[Random], str]:
    return lambda random: expression.format(random.randint(1, 20))


# Values of columns that are keys.
KEY_KINDS = {
    "int": _numbered("{}"),
    "bigint": _numbered("({} * 4000000000)"),
    "smallint": _numbered("{}"),
    "text": _numbered("'key {} ''é'"),
    "varchar(20)": _numbered("'k{}'"),
    "char(6)": _numbered("'k{}'"),
    "uuid": _numbered("md5('{}')::uuid"),
    "numeric": _numbered("({} / 3.0)"),
    "numeric(5,1)": _numbered("({} / 2.0)"),
    "double precision": _numbered("({} / 7.0)"),
    "date": _numbered("('2024-02-20'::date + {})"),
    "timestamptz": _numbered("('2024-02-20 12:00:00.000001Z'::timestamptz + {} * '7 hours'::interval)"),
    "bytea": _numbered(r"decode(md5('{}'), 'hex')"),
    "inet": _numbered("'10.0.0.{}'"),
    "interval": _numbered("({} * '1 day 1 sec'::interval)"),
    "int4range": _numbered("int4range({0}, {0} + 3)"),
    "int[]": _numbered("ARRAY[{0}, NULL, {0}]"),
    "jsonb": _numbered("jsonb_build_array({})"),
    "mood": lambda random: random.choice(["'sad'", "'ok'", "'happy'", "'it''s'"]),
    "small": _numbered("{}"),
    "pg_lsn": _numbered("('0/0'::pg_lsn + {})"),
    '"char"': _numbered("chr(64 + {})"),
    "oid": _numbered("{}"),
    "bit(6)": _numbered("{}::bit(6)"),
}
