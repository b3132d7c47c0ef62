"""Seeing that a table still has the shape it was mapped with, in each transaction and at next to no cost.

Theory of operation. After the first change of a table has taken its lock, so that nobody can alter it before we commit,
the server compares its shape (subscriber.table_shape()) with that of the mapping. That is five looks into the
catalog, and would be a third of what a transaction of one row takes the server. A server process is told of
each change of a table that could matter to its plans, and then makes them anew. So the statement that compares is
prepared for one table, which it names in a constant, and has in it another constant, the moment at which it was
analysed: 'now'. As long as that is the moment it was when the shapes were last found equal, they still are. If it is
not, they are compared again: ANALYZE and the like change plans, too, and not the shape.

What makes plans anew: a table's columns, constraints, indexes, triggers, rules, name, owner and identity; of a schema's
name all plans. Not so what is asked for each time: whether the subscription's owner may act as the table's. And not the
indexes of a table's partitions, so partitioned tables are compared each time.

A guarded table is locked and compared before its first change, since its owner could have put code there meanwhile that
must not run in the session. Its shape has more in it (subscriber.guarded_shape()): all that foreign_code() has looked
at. Where foreign code may run it is compared each time, as what the session's role may do has no part in plans.

Source: PlanCacheRelCallback() and PlanCacheSysCallback() in plancache.c, fix_expr_common() in setrefs.c.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import STATEMENTS, Pipeline, Rows
from subscriber.errors import StaleMapping
from subscriber.quoting import qualified
from subscriber.sqlstate import (
    CLASS_DATA_EXCEPTION,
    CLASS_FEATURE_NOT_SUPPORTED,
    CLASS_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION,
    PROTOCOL_VIOLATION,
    TARGET_TABLE_CHANGED,
)

# What a statement for the old shape may fail with before the check is reached: names and types that do not
# fit any more, values that are too large for the old type, binary ones that are too short for the new one (08P01).
# The next attempt has a fresh mapping and tells.
OF_AN_OLD_SHAPE = (
    CLASS_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION,
    CLASS_DATA_EXCEPTION,
    CLASS_FEATURE_NOT_SUPPORTED,
    PROTOCOL_VIOLATION,
)

_ANALYSED = "'now'::pg_catalog.timestamptz::pg_catalog.text"
_CHECK = f"""
SELECT {_ANALYSED}
 WHERE CASE
   WHEN {_ANALYSED} = $1::pg_catalog.text
        AND ($3::pg_catalog.text = ''
             OR pg_catalog.pg_has_role($3::pg_catalog.text::pg_catalog.name, $4::pg_catalog.name, 'MODE')) THEN false
   WHEN SHAPE = $2::pg_catalog.text THEN true
   ELSE subscriber.raise_error('{TARGET_TABLE_CHANGED}', 'the target table has changed its shape') END
"""
_SHAPE = "subscriber.table_shape('RELATION'::pg_catalog.regclass, $3::pg_catalog.text)"
_GUARDED_SHAPE = """subscriber.guarded_shape('RELATION'::pg_catalog.regclass, $3::pg_catalog.text,
        ARRAY(SELECT pg_catalog.json_array_elements_text($5::pg_catalog.json))::pg_catalog.name[])"""
Fetch = Callable[..., Awaitable[Sequence[Sequence[object]]]]

_NOTHING_NEW = b"SELECT 0\0"
_NEVER = (None, "", b"")
_AT_ONCE = 10  # tables that are compared before the stream is looked at again
_MOST_AHEAD = STATEMENTS // 2  # tables: the statements that compare must not push each other out


class SchemaChecker:
    """Of the tables of one session."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._mode = "SET" if pipeline.session.server_version >= 160000 else "MEMBER"
        self._equal: dict[int, tuple[LocalRelation, str, bytes]] = {}  # by OID: as it was last found, and how to ask
        self._later: deque[LocalRelation] = deque()  # those of check_later() that are not compared yet

    def forget(self) -> None:
        """Compare every table again: the transaction goes on without the locks that it had.

        What is analysed again in the same transaction has the same moment in it.
        """
        self._equal = {}

    def check(self, local: LocalRelation, owner: str, note: object) -> None:
        """Queue what fails if the table is not as `local` any more. `owner` is the subscription's, or empty."""
        known = self._equal
        equal, sql, parameters = known.get(local.oid, _NEVER)
        if equal is not local:
            sql = _CHECK.replace("SHAPE", _GUARDED_SHAPE if local.guarded else _SHAPE)
            sql = sql.replace("RELATION", str(local.oid)).replace("MODE", self._mode)
            parameters = self._pipeline.texts(_parameters(local, owner, None))

        def answered(_note: object, _tag: str, rows: Rows) -> None:
            if not local.partitioned and not local.foreign and local.may_set_role:
                equal = self._pipeline.texts(_parameters(local, owner, rows[0][0]))
                known[local.oid] = (local, sql, equal)  # which is perhaps forgotten

        self._pipeline.execute(sql, parameters=parameters, note=note, expect=_NOTHING_NEW, on_result=answered)

    def check_later(self, tables: Iterable[LocalRelation]) -> None:
        """Have check_some() compare those that can be compared between transactions."""
        plain = [table for table in tables if not table.guarded and not table.partitioned]
        self._later.extend(plain[:_MOST_AHEAD])

    def check_some(self, owner: str, note: object) -> bool:
        """Queue check() for the next of check_later(), outside of a transaction. False: there is none."""
        some = [self._later.popleft() for _ in range(min(_AT_ONCE, len(self._later)))]
        for local in some:
            self.check(local, owner, note)
        return bool(some)


@dataclass(frozen=True, slots=True)
class TableGuard:
    """What keeps foreign code off a table in sessions that have no pipeline; it travels to executors."""

    role: str  # to lock as; "none": the session's own
    lock: str
    relid: int
    owner: str  # of the subscription
    code_of: tuple[str, ...]
    shape: str

    async def apply(self, fetch: Fetch) -> None:
        """In the transaction that is going to write the table. Raises StaleMapping.

        `fetch` runs a statement with parameters that are text: a pipeline's rows(), or asyncpg's fetch().
        """
        await fetch(_SET_ROLE, self.role)
        await fetch(self.lock)
        await fetch(_SET_ROLE, "none")
        code_of = json.dumps(self.code_of, ensure_ascii=False)
        ((shape,),) = await fetch(_COMPARED, str(self.relid), self.owner, code_of)
        if shape != self.shape:
            raise StaleMapping("the target table has changed its shape", sqlstate=TARGET_TABLE_CHANGED)


_SET_ROLE = "SELECT pg_catalog.set_config('role', $1, true)"
_COMPARED = """
SELECT subscriber.guarded_shape($1::pg_catalog.text::pg_catalog.oid, $2,
         ARRAY(SELECT pg_catalog.json_array_elements_text($3::pg_catalog.text::pg_catalog.json))::pg_catalog.name[])
"""


def guard(local: LocalRelation, role: str, owner: str) -> TableGuard | None:
    """None: the table needs none."""
    if not local.guarded:
        return None
    return TableGuard(role, lock(local, "ROW EXCLUSIVE"), local.oid, owner, local.code_of, local.shape)


def _parameters(local: LocalRelation, owner: str, analysed: str | None) -> list[str | None]:
    values = [analysed, local.shape, owner, local.owner]
    return [*values, json.dumps(local.code_of, ensure_ascii=False)] if local.guarded else values


def lock(local: LocalRelation, mode: str) -> str:
    """The statement that keeps others from putting code on the table, before there is a change to do so.

    `mode` is at least ACCESS SHARE for a table that is read, and ROW EXCLUSIVE for one that is written: with these
    nobody else can drop, rename or alter it, or add a trigger. To attach a partition takes less, hence the stronger
    lock.
    """
    name = qualified(local.schema, local.name)
    if local.partitioned:
        return f"LOCK TABLE {name} IN SHARE UPDATE EXCLUSIVE MODE"
    return f"LOCK TABLE ONLY {name} IN {mode} MODE"
