"""The tables of the differential tests: the feature of each, and values for their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tests.differential.kinds import Kind

Value = Callable[[Random], str]  # an SQL expression

KEYS = 25  # few, so that statements meet each other's rows

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy', 'it''s')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN small AS int CHECK (VALUE < 1000)",
)


def _or_null(value: Value, share: float = 0.2) -> Value:
    return lambda random: "NULL" if random.random() < share else value(random)


def _one_of(*values: str) -> Value:
    return lambda random: random.choice(values)


def key(random: Random) -> str:
    return str(random.randint(1, KEYS))


def number(random: Random) -> str:
    return str(random.randint(-5, 5))


def cents(random: Random) -> str:
    return f"{random.randint(-9999, 9999) / 100:.2f}"


def large(random: Random) -> str:
    """Return a text that is stored out of line, because the columns have no compression."""
    return f"repeat(md5('{random.randint(1, 9)}'), {random.randint(80, 120)})"


text = _or_null(_one_of("''", "'a'", "'it''s'", r"'back\slash'", "E'tab\\tline\\n'", "'Łódź €'", "'NULL'", "'\\N'"))
integer = _or_null(number)
float8 = _or_null(_one_of("0", "-0.0", "'NaN'", "'Infinity'", "1.1", "1e-300", "0.1::float8 + 0.2"))
array = _or_null(_one_of("'{}'", "'{1,NULL,3}'", "'{{1,2},{3,4}}'", "'[0:1]={5,6}'"))
moment = _or_null(_one_of("'2024-02-29 12:00:00.123456+05'", "'infinity'", "'0044-03-15 BC'", "'epoch'"))


@dataclass(frozen=True)
class Table:
    """A table. `source` and `target` are the statements that create it there; `columns` are those that get values.

    - `same`: at the end, the target's rows equal the source's.
    - `local_delete`, `local_update`: rows may be deleted, or updated, on the targets; the rows are not the same then.
    - `changes`: UPDATE and DELETE are possible.
    - `text_only`: the types differ.
    - `after_copy`: written only after the copy, because the result depends on the moment of the copy.
    - `triggers`: statements for the targets, executed only after the copy for the same reason.
    - `kinds`: types of columns that it may get.
    - `identity`: only for random tables.
    - `comparable`: all columns' types have an operator for equality.
    """

    name: str
    columns: Mapping[str, Value]
    source: tuple[str, ...]
    target: tuple[str, ...] = ()  # empty: as on the source
    key: tuple[str, ...] = ("id",)
    publication: str = "leaves"
    same: bool = True
    local_delete: bool = False
    changes: bool = True
    text_only: bool = False
    after_copy: bool = False
    insert_options: str = ""
    local_update: bool = False
    triggers: tuple[str, ...] = ()
    kinds: Sequence[Kind] = ()
    identity: str = ""
    comparable: bool = True


TABLES = (
    Table(
        "plain",
        {"id": key, "n": integer, "t": text, "f": float8},
        ("CREATE TABLE plain (id int PRIMARY KEY, n int, t text, f float8)",),
        local_delete=True,
    ),
    Table(
        "composite",
        {"a": number, "b": _one_of("'x'", "'y'", "''"), "v": cents, "w": moment},
        ("CREATE TABLE composite (a int, b text, v numeric(10,2), w timestamptz, PRIMARY KEY (b, a))",),
        key=("a", "b"),
    ),
    Table(
        "by_index",
        {"id": key, "k": key, "v": text},
        (
            "CREATE TABLE by_index (id int PRIMARY KEY, v text, k int NOT NULL CONSTRAINT by_index_k UNIQUE)",
            "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_k",
        ),
        key=("k",),
        local_delete=True,
    ),
    Table(
        "whole",
        {"a": integer, "b": text, "c": float8, "d": array},
        ("CREATE TABLE whole (a int, b text, c float8, d int[])", "ALTER TABLE whole REPLICA IDENTITY FULL"),
        key=("a",),
        local_delete=True,
    ),
    Table(
        "whole_indexed",
        {"a": integer, "b": integer},
        (
            "CREATE TABLE whole_indexed (a int, b int)",
            "CREATE INDEX ON whole_indexed (a, b)",
            "ALTER TABLE whole_indexed REPLICA IDENTITY FULL",
        ),
        key=("a",),
    ),
    Table(
        "whole_with_key",
        {"id": key, "v": text},
        ("CREATE TABLE whole_with_key (id int, v text)", "ALTER TABLE whole_with_key REPLICA IDENTITY FULL"),
        ("CREATE TABLE whole_with_key (v text, id int)",),
    ),
    Table(
        "nothing",
        {"a": integer, "b": text},
        ("CREATE TABLE nothing (a int, b text)", "ALTER TABLE nothing REPLICA IDENTITY NOTHING"),
        changes=False,
    ),
    Table(
        "no_key",
        {"a": integer, "b": text},
        ("CREATE TABLE no_key (a int, b text)",),
        changes=False,
    ),
    Table(
        "parted",
        {"id": key, "v": text},
        (
            "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (10)",
            "CREATE TABLE parted_2 (v text, id int NOT NULL)",
            "ALTER TABLE parted ATTACH PARTITION parted_2 DEFAULT",
        ),
    ),
    Table(
        "rooted",
        {"id": key, "v": text, "n": integer},
        (
            "CREATE TABLE rooted (id int, v text, n int, PRIMARY KEY (id)) PARTITION BY HASH (id)",
            "CREATE TABLE rooted_1 PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE rooted_2 PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        ),
        (
            "CREATE TABLE rooted (n int, id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE rooted_low PARTITION OF rooted FOR VALUES FROM (MINVALUE) TO (7)",
            "CREATE TABLE rooted_high (junk int, v text, n int, id int NOT NULL)",
            "ALTER TABLE rooted_high DROP COLUMN junk",
            "ALTER TABLE rooted ATTACH PARTITION rooted_high FOR VALUES FROM (7) TO (MAXVALUE)",
        ),
        publication="roots",
        local_delete=True,
    ),
    Table(
        "rooted_plain",
        {"id": key, "v": text},
        (
            "CREATE TABLE rooted_plain (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE rooted_plain_1 PARTITION OF rooted_plain FOR VALUES FROM (MINVALUE) TO (12)",
            "CREATE TABLE rooted_plain_2 PARTITION OF rooted_plain DEFAULT",
        ),
        ("CREATE TABLE rooted_plain (id int PRIMARY KEY, v text)",),
        publication="roots",
    ),
    Table(
        "rooted_full",
        {"id": key, "v": text},
        (
            "CREATE TABLE rooted_full (id int, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE rooted_full_1 PARTITION OF rooted_full DEFAULT",
            "ALTER TABLE rooted_full REPLICA IDENTITY FULL",
            "ALTER TABLE rooted_full_1 REPLICA IDENTITY FULL",
        ),
        (
            "CREATE TABLE rooted_full (id int, v text) PARTITION BY LIST (v)",
            "CREATE TABLE rooted_full_1 PARTITION OF rooted_full FOR VALUES IN ('', 'a', NULL)",
            "CREATE TABLE rooted_full_2 PARTITION OF rooted_full DEFAULT",
        ),
        publication="roots",
    ),
    Table(
        "identities",
        {"id": key, "v": text, "n": integer},
        ("CREATE TABLE identities (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text, n int)",),
        insert_options="OVERRIDING SYSTEM VALUE",
    ),
    Table(
        "computed",
        {"id": key, "a": number},
        ("CREATE TABLE computed (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) STORED)",),
        ("CREATE TABLE computed (b int GENERATED ALWAYS AS (a * 3) STORED, a int, id int PRIMARY KEY)",),
    ),
    Table(
        "extra",
        {"id": key, "a": integer, "b": text},
        ("CREATE TABLE extra (id int PRIMARY KEY, a int, gone int, b text)", "ALTER TABLE extra DROP COLUMN gone"),
        ("CREATE TABLE extra (c int DEFAULT 7, b text, d text DEFAULT upper('x'), id int PRIMARY KEY, a int)",),
        local_delete=True,
    ),
    Table(
        "whole_extra",
        {"a": integer, "b": text},
        ("CREATE TABLE whole_extra (a int, b text)", "ALTER TABLE whole_extra REPLICA IDENTITY FULL"),
        ("CREATE TABLE whole_extra (a int, c int DEFAULT 1, b text)",),
        key=("a",),
        same=False,  # no row has NULL in c: none is found
        after_copy=True,
    ),
    Table(
        "whole_extra_null",
        {"a": integer, "b": text},
        ("CREATE TABLE whole_extra_null (a int, b text)", "ALTER TABLE whole_extra_null REPLICA IDENTITY FULL"),
        ("CREATE TABLE whole_extra_null (c int, b text, a int)",),
        key=("a",),
    ),
    Table(
        "toasted",
        {"id": key, "body": _or_null(large), "n": integer},
        (
            "CREATE TABLE toasted (id int PRIMARY KEY, body text, n int)",
            "ALTER TABLE toasted ALTER body SET STORAGE EXTERNAL",
        ),
    ),
    Table(
        "toasted_whole",
        {"id": number, "body": _or_null(large), "n": integer},
        (
            "CREATE TABLE toasted_whole (id int, body text, n int)",
            "ALTER TABLE toasted_whole ALTER body SET STORAGE EXTERNAL",
            "ALTER TABLE toasted_whole REPLICA IDENTITY FULL",
        ),
    ),
    Table(
        "numeric_key",
        {"id": _one_of("1", "1.0", "1.00", "2", "'NaN'", "1e10", "10000000000"), "v": text},
        ("CREATE TABLE numeric_key (id numeric PRIMARY KEY, v text)",),
    ),
    Table(
        "float_key",
        {"id": _one_of("0", "'-0'", "'NaN'", "'Infinity'", "0.1::float8 + 0.2", "0.3"), "v": text},
        ("CREATE TABLE float_key (v text, id float8 PRIMARY KEY)",),
    ),
    Table(
        "char_key",
        {"id": _one_of("'a'", "'a '", "'b'", "''"), "j": _one_of("'a'", "'a '"), "v": text},
        ("CREATE TABLE char_key (id char(3), j varchar(3), v text, PRIMARY KEY (id, j))",),
        local_delete=True,
    ),
    Table(
        "many_uniques",
        {"id": key, "u": _or_null(key), "w": integer},
        (
            "CREATE TABLE many_uniques (id int PRIMARY KEY, u int UNIQUE, w int)",
            "CREATE UNIQUE INDEX ON many_uniques ((w + id)) WHERE w > 3",
        ),
    ),
    Table(
        "computed_whole",
        {"a": integer, "c": text},
        (
            "CREATE TABLE computed_whole (a int, gone int, c text)",
            "ALTER TABLE computed_whole DROP gone",
            "ALTER TABLE computed_whole REPLICA IDENTITY FULL",
        ),
        (
            "CREATE TABLE computed_whole (c text, gone int, b int GENERATED ALWAYS AS (a * 3) STORED, a int)",
            "ALTER TABLE computed_whole DROP gone",
            "CREATE INDEX ON computed_whole (b, a)",
            "CREATE INDEX ON computed_whole (a)",
        ),
        key=("a",),
    ),
    Table(
        "kinds",
        {
            "id": key,
            "m": _or_null(_one_of("'sad'", "'it''s'")),
            "p": _or_null(_one_of("'(1,x)'", "'(,)'", "'(2,\"a,b\")'")),
            "s": _or_null(_one_of("1", "999")),
            "j": _or_null(_one_of("'{\"a\": [1, null]}'", "'null'", "'\"x\"'")),
            "r": _or_null(_one_of("'empty'", "'[1,5)'", "'(,)'")),
            "y": _or_null(_one_of(r"'\x00ff'", r"'\x'")),
            "i": _or_null(_one_of("'1 year 2 mons -3 days 04:05:06.7'", "'-1 sec'")),
            "bits": _or_null(_one_of("B''", "B'0101'")),
            "c": _or_null(_one_of("'ab'", "'  '")),
            "ip": _or_null(_one_of("'10.0.0.1/8'", "'::1'")),
            "o": _or_null(_one_of("true", "false")),
        },
        (
            "CREATE TABLE kinds (id int PRIMARY KEY, m mood, p pair, s small, j jsonb, r int4range, y bytea,"
            " i interval, bits varbit, c char(5), ip inet, o bool)",
        ),
    ),
    Table(
        "kinds_whole",
        {
            "m": _or_null(_one_of("'sad'", "'ok'")),
            "p": _or_null(_one_of("'(1,x)'", "'(,)'")),
            "s": _or_null(_one_of("1", "2")),
            "r": _or_null(_one_of("'empty'", "'[1,5)'")),
            "v": _or_null(cents),
            "c": _or_null(_one_of("'ab'", "'  '")),
            "w": moment,
        },
        (
            "CREATE TABLE kinds_whole (m mood, p pair, s small, r int4range, v numeric(6,2), c char(5), w timestamptz)",
            "ALTER TABLE kinds_whole REPLICA IDENTITY FULL",
        ),
        key=("s",),
    ),
    Table(
        "other_types",
        {"id": key, "a": number, "b": cents},
        ("CREATE TABLE other_types (id int PRIMARY KEY, a int, b numeric)",),
        ("CREATE TABLE other_types (id bigint PRIMARY KEY, a text, b double precision)",),
        same=False,
        text_only=True,
    ),
)

# Added to the publication and to the subscriptions in the middle.
LATE = Table(
    "late",
    {"id": key, "v": text},
    ("CREATE TABLE late (id int PRIMARY KEY, v text)",),
)
