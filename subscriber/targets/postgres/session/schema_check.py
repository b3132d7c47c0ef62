"""Check in each transaction, at almost no cost, that a table still has the shape of its mapping.

Theory of operation. The first change of a table takes its lock, so that no session can alter it before we commit. Then
the server compares its shape (subscriber.table_shape()) with that of the mapping. This needs five catalog lookups, and
would be a third of the server's work for a transaction of one row. A server process is notified of each change of a
table that could affect its plans, and then plans its statements again. The comparing statement uses that: it is
prepared for one table, which it names in a constant. Another constant, 'now', is the time at which it was analysed.
While that time equals the time of the last successful comparison, the shapes are still equal. Otherwise they are
compared again: ANALYZE and some other commands invalidate plans too, but do not change the shape.

Changes of a table's columns, constraints, indexes, triggers, rules, name, owner and identity invalidate its plans. A
new name of a schema invalidates all plans. Two things do not invalidate plans. Whether the subscription's owner may
act as the table's owner is checked each time. The indexes of a table's partitions do not count either, so partitioned
tables are compared each time.

A guarded table is locked and compared before its first change, since its owner could have added code in between that
must not run in the session. Its shape contains more (subscriber.guarded_shape()): everything that foreign_code()
depends on. Where foreign code may run it is compared each time, because plans do not depend on the rights of the
session's role.

Source: PlanCacheRelCallback() and PlanCacheSysCallback() in plancache.c, fix_expr_common() in setrefs.c.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable

from subscriber import server_features as features
from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import STATEMENTS, Pipeline, Rows
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
# The next attempt has a current mapping, and shows whether the error remains.
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

_NOTHING_NEW = b"SELECT 0\0"
_NEVER = (None, "", b"")
_AT_ONCE = 10  # tables that are compared before the stream is read again
_MOST_AHEAD = STATEMENTS // 2  # tables: the statements that compare must not push each other out


class SchemaChecker:
    """Detects DDL on the tables of one session."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._mode = features.set_role_privilege(pipeline.session.server_version // 10_000)
        self._equal: dict[int, tuple[LocalRelation, str, bytes]] = {}  # by OID: as it was last found, and how to ask
        self._later: deque[LocalRelation] = deque()  # those of check_later() that are not compared yet

    def forget(self) -> None:
        """Compare every table again: the transaction continues without its locks.

        A statement that is analysed again in the same transaction has the same time.
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


def _parameters(local: LocalRelation, owner: str, analysed: str | None) -> list[str | None]:
    values = [analysed, local.shape, owner, local.owner]
    return [*values, json.dumps(local.code_of, ensure_ascii=False)] if local.guarded else values


def lock(local: LocalRelation, mode: str) -> str:
    """Return the statement that locks the table before its first change, so that no other session can add code to it.

    `mode` is at least ACCESS SHARE for a table that is read, and ROW EXCLUSIVE for one that is written. Then no other
    session can drop, rename or alter it, or add a trigger. Attaching a partition needs a weaker lock, hence the
    stronger mode.
    """
    name = qualified(local.schema, local.name)
    if local.partitioned:
        return f"LOCK TABLE {name} IN SHARE UPDATE EXCLUSIVE MODE"
    return f"LOCK TABLE ONLY {name} IN {mode} MODE"
