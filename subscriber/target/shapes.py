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

Source: PlanCacheRelCallback() and PlanCacheSysCallback() in plancache.c, fix_expr_common() in setrefs.c.
"""

from __future__ import annotations

from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import Pipeline, Rows
from subscriber.protocol import wire

CHANGED = "SB001"  # SQLSTATE of our own
# What a statement for the old shape may fail with before the check is reached: names and types that do not
# fit any more, values that are too large for the old type, binary ones that are too short for the new one (08P01).
# The next attempt has a fresh mapping and tells.
OF_AN_OLD_SHAPE = ("42", "22", "0A", "08P01")

_ANALYSED = "'now'::pg_catalog.timestamptz::pg_catalog.text"
_CHECK = f"""
SELECT {_ANALYSED}
 WHERE CASE
   WHEN {_ANALYSED} = $1::pg_catalog.text
        AND ($3::pg_catalog.text = ''
             OR pg_catalog.pg_has_role($3::pg_catalog.text::pg_catalog.name, $4::pg_catalog.name, 'MODE')) THEN false
   WHEN subscriber.table_shape('RELATION'::pg_catalog.regclass, $3::pg_catalog.text) = $2::pg_catalog.text THEN true
   ELSE subscriber.raise_error('{CHANGED}', 'the target table has changed its shape') END
"""
_NOTHING_NEW = b"SELECT 0\0"
_NEVER = (None, "", b"")


class Shapes:
    """Of the tables of one session."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._mode = "SET" if pipeline.session.server_version >= 160000 else "MEMBER"
        self._equal: dict[int, tuple[LocalRelation, str, bytes]] = {}  # by OID: as it was last found, and how to ask

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
            sql = _CHECK.replace("RELATION", str(local.oid)).replace("MODE", self._mode)
            parameters = wire.text_parameters((None, local.shape, owner, local.owner))

        def answered(_note: object, _tag: str, rows: Rows) -> None:
            if not local.partitioned and local.may_set_role:
                values = (rows[0][0], local.shape, owner, local.owner)
                known[local.oid] = (local, sql, wire.text_parameters(values))  # which is perhaps forgotten by now

        self._pipeline.execute(sql, parameters=parameters, note=note, expect=_NOTHING_NEW, on_result=answered)
