"""The schema of this program, and what a publisher sends about subscriptions of its own.

An application may have a schema "subscriber", too. The program's own one is known by its mark: a comment that the
migrations write, and before revision 0013 a column of table `subscription`. In the marked schema, the relations of
OWN_RELATIONS are the program's own. All others belong to an application, and are published and replicated like those
of any other schema.

The program's own tables are no part of a publication, although FOR ALL TABLES published them before they were UNLOGGED:
they have connection strings with passwords. The publisher is asked for the OIDs of these tables before a stream starts.
Messages with the prefix "subscriber" only make commits durable, see worker/wal_flush.py. OwnSchemaFilter removes both
from a stream.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from subscriber import quoting
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Truncate

OWN_SCHEMA = "subscriber"
MESSAGE_PREFIX = "subscriber"
COMMENT = "Subscriptions of the program subscriber. Revision "  # of the schema, in front of its revision

# Tables, views and sequences of all revisions.
OWN_RELATIONS = frozenset(
    (
        *("alembic_version", "audit", "bulk_copy", "bulk_copy_rel", "complete", "confirmed", "conflict_history"),
        *("copied_range", "copy_done", "deleted_row", "history", "hold", "identity", "large_objects", "launcher"),
        *("migration", "migration_step", "number", "own_session", "pg_stat_subscription"),
        *("pg_stat_subscription_stats", "pg_subscription", "pg_subscription_rel", "prepared", "progress"),
        *("progress_record", "quarantine", "repair_transaction", "repairs", "retention", "session", "subscription"),
        *("subscription_oid", "subscription_rel", "subscription_sequence", "subscription_stats", "touched_range"),
        *("verification", "worker"),
    )
)
STAGING = "^catchup_[0-9]+_[0-9]+$"  # names of the tables of a catch-up (spark/catchup/staging.py)

# n is pg_namespace, c is pg_class.
IS_OURS = f"""(n.nspname = '{OWN_SCHEMA}' AND (
    EXISTS (SELECT FROM pg_catalog.pg_description m
             WHERE m.objoid = n.oid AND m.classoid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
               AND m.description LIKE '{COMMENT}%')
    OR EXISTS (SELECT FROM pg_catalog.pg_class m JOIN pg_catalog.pg_attribute a ON a.attrelid = m.oid
                WHERE m.relnamespace = n.oid AND m.relname = 'subscription' AND a.attname = 'subconninfo')))"""
IS_OWN_NAME = f"(c.relname IN ({quoting.literals(sorted(OWN_RELATIONS))}) OR c.relname ~ '{STAGING}')"
IS_OWN = f"({IS_OURS} AND {IS_OWN_NAME})"
# Rows: OID and name.
OWN_QUERY = (
    "SELECT c.oid, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    f" WHERE c.relkind IN ('r', 'p', 'S') AND {IS_OWN}"
)
_STAGING = re.compile(STAGING)

_MARK = b"subscriber\0"  # the schema in a RELATION message, the prefix in a MESSAGE
_LETTER = XLOG_DATA_HEADER.size
_BODY = _LETTER + 1
_XID = 4  # bytes in front of the body of a message in a block
_MARK_AT = {0x52: _BODY + 4, 0x4D: _BODY + 9}  # R: behind the OID; M: behind flags and position
_RARE = frozenset((b"R", b"M"))
_RELATION, _TRUNCATE = 0x52, 0x54
_ROWS = b"IUD"
_STREAM_START, _STREAM_STOP = 0x53, 0x45


def is_own_name(schema: str, name: str) -> bool:
    """Return True if a relation of that name belongs to this program, in a database whose schema is its own."""
    return schema == OWN_SCHEMA and (name in OWN_RELATIONS or _STAGING.match(name) is not None)


class OwnSchemaFilter:
    """Removes the messages about the program's own tables from the frames of one connection. BEGIN and COMMIT stay."""

    def __init__(self, own: Collection[int]) -> None:
        """Create a filter. `own`: the OIDs of the publisher's tables that are the program's own."""
        self._own = own
        self._relids: set[int] = set()  # of those that the stream has described
        self._in_block = False  # between STREAM START and STREAM STOP; only known while there are _relids

    def filter(self, frames: list[bytes]) -> list[bytes]:
        """Return the frames that are not ours, in their order; perhaps none."""
        if not self._relids and _RARE.isdisjoint([frame[_LETTER:_BODY] for frame in frames]):
            return frames
        return [kept for frame in frames if (kept := self._filter(frame))]

    def _filter(self, frame: bytes) -> bytes | None:
        if len(frame) < _BODY or frame[0] != XLOG_DATA:
            return frame
        letter = frame[_LETTER]
        if letter in _ROWS:
            return None if self._relid(frame) in self._relids else frame
        if letter in _MARK_AT:
            return None if self._is_marked(frame, _MARK_AT[letter]) else frame
        if letter == _TRUNCATE:
            return self._truncate(frame) if self._relids else frame
        if letter in (_STREAM_START, _STREAM_STOP):
            self._in_block = letter == _STREAM_START
        return frame

    def _relid(self, frame: bytes) -> int:
        at = _BODY + _XID if self._in_block else _BODY
        return int.from_bytes(frame[at : at + 4], "big")

    def _is_marked(self, frame: bytes, at: int) -> bool:
        """Return True for a RELATION of an own table or a MESSAGE with the prefix. A stream block shifts the mark."""
        for in_block, place in ((False, at), (True, at + _XID)):
            if frame.startswith(_MARK, place):
                if frame[_LETTER] == _RELATION:
                    relid = int.from_bytes(frame[place - 4 : place], "big")
                    if relid not in self._own:
                        return False
                    self._relids.add(relid)
                self._in_block = in_block
                return True
        return False

    def _truncate(self, frame: bytes) -> bytes | None:
        message = Decoder(in_block=self._in_block).decode(frame, _LETTER)
        assert isinstance(message, Truncate)
        left = tuple(relid for relid in message.relids if relid not in self._relids)
        if len(left) == len(message.relids):
            return frame
        rest = Truncate(message.xid, message.cascade, message.restart_identity, left)
        return frame[:_LETTER] + encode(rest) if left else None
