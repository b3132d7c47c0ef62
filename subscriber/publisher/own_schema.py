"""The schema of this program, and what a publisher sends about it.

An application may have a schema "subscriber", too. The program's own one is known by its mark, the comment. In the
marked schema, the relations of OWN_RELATIONS are the program's own. All others belong to an application, and are
published and replicated like those of any other schema.

A publisher that is a target itself sends no rows of the program's tables: they are UNLOGGED, and no publication has
them. Messages with the prefix "subscriber" only make commits durable, see worker/wal_flush.py. OwnMessageFilter removes
them from a stream.
"""

from __future__ import annotations

from subscriber import quoting
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER

OWN_SCHEMA = "subscriber"
MESSAGE_PREFIX = "subscriber"
COMMENT = "Subscriptions of the program subscriber. Revision "  # of the schema, in front of its revision

# Tables, views and sequences of all releases.
OWN_RELATIONS = frozenset(
    (
        *("alembic_version", "audit", "complete", "conflict_history", "copied_range", "deleted_row", "history"),
        *("hold", "identity", "large_objects", "launcher", "migration", "migration_step", "number", "own_session"),
        *("pg_stat_subscription",),
        *("pg_stat_subscription_stats", "pg_subscription", "pg_subscription_rel", "prepared", "progress"),
        *("progress_record", "quarantine", "repair_transaction", "repairs", "retention", "session", "subscription"),
        *("subscription_rel", "subscription_sequence", "subscription_stats", "touched_range"),
        *("verification", "worker"),
    )
)

# n is pg_namespace, c is pg_class.
IS_OURS = f"""(n.nspname = '{OWN_SCHEMA}' AND
    EXISTS (SELECT FROM pg_catalog.pg_description m
             WHERE m.objoid = n.oid AND m.classoid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
               AND m.description LIKE '{COMMENT}%'))"""
IS_OWN_NAME = f"c.relname IN ({quoting.literals(sorted(OWN_RELATIONS))})"
IS_OWN = f"({IS_OURS} AND {IS_OWN_NAME})"
# Rows: the name. Sequences are permanent before PostgreSQL 15, and stay so in an upgraded server.
OWN_SEQUENCES = (
    "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    f" WHERE c.relkind = 'S' AND {IS_OWN}"
)

_LETTER = XLOG_DATA_HEADER.size
_BODY = _LETTER + 1
_XID = 4  # bytes in front of the body of a message in a block
_PREFIX_AT = _BODY + 9  # behind flags and position
_PREFIX = MESSAGE_PREFIX.encode() + b"\0"
_MESSAGE, _STREAM_START, _STREAM_STOP = b"M", b"S", b"E"
_LOOKED_AT = frozenset((_MESSAGE, _STREAM_START, _STREAM_STOP))


def is_own_name(schema: str, name: str) -> bool:
    """Return True if a relation of that name belongs to this program, in a database whose schema is its own."""
    return schema == OWN_SCHEMA and name in OWN_RELATIONS


class OwnMessageFilter:
    """Removes the messages with the program's prefix from the frames of one connection."""

    def __init__(self) -> None:
        self._in_block = False  # between STREAM START and STREAM STOP

    def filter(self, frames: list[bytes]) -> list[bytes]:
        """Return the frames that are not ours, in their order; perhaps none."""
        if _LOOKED_AT.isdisjoint([frame[_LETTER:_BODY] for frame in frames]):
            return frames
        return [frame for frame in frames if not self._is_own(frame)]

    def _is_own(self, frame: bytes) -> bool:
        letter = frame[_LETTER:_BODY]
        if letter not in _LOOKED_AT or frame[0] != XLOG_DATA:
            return False
        if letter == _MESSAGE:
            return frame.startswith(_PREFIX, _PREFIX_AT + (_XID if self._in_block else 0))
        self._in_block = letter == _STREAM_START
        return False
