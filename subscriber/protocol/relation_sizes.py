"""A limit for the memory of table descriptions.

A publisher describes each table before its first change and expects its client to remember that. A publisher that never
stops describing tables would use up the memory of a worker.
"""

from __future__ import annotations

from subscriber.errors import ProtocolError
from subscriber.protocol.messages import Relation
from subscriber.sqlstate import PROGRAM_LIMIT_EXCEEDED

# Bytes of the objects of a description, beside the characters of its names.
_TABLE = 400
_COLUMN = 200


class RelationSizes:
    """The sizes of all descriptions that one reader of a stream remembers."""

    def __init__(self, limit: int | None) -> None:
        """`limit` is in bytes. None: there is none."""
        self._limit = limit
        self._sizes: dict[int, int] = {}
        self._sum = 0

    def add(self, relation: Relation) -> None:
        """Count a description, in place of an earlier one of the same table.

        Raises:
            ProtocolError: the descriptions exceed the limit (54000).
        """
        size = _size(relation)
        self._sum += size - self._sizes.get(relation.relid, 0)
        self._sizes[relation.relid] = size
        if self._limit is not None and self._sum > self._limit:
            raise ProtocolError(
                f"the publisher has described tables that need more than {self._limit:,} bytes of memory",
                hint="If it has so many tables and columns, increase the setting relation_cache_size.",
                sqlstate=PROGRAM_LIMIT_EXCEEDED,
            )


def _size(relation: Relation) -> int:
    names = len(relation.namespace) + len(relation.name) + sum(len(column.name) for column in relation.columns)
    return _TABLE + _COLUMN * len(relation.columns) + names
