"""StreamOrigin: where a query of pgcdc begins, and how the changes of its tables identify rows.

It is metadata of the column `_seq`, so a DataFrame has it on the driver, and also after where() and select(), and in a
session of Spark Connect. A DataFrame with a schema of its own (`.schema(…)`) need not have it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias

from subscriber.lsn import Lsn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

COLUMN = "_seq"
_KEY = "subscriber.pgcdc"

# Rows of a snapshot, the option `start`, or neither of them: the beginning of the log.
Begin: TypeAlias = Literal["snapshot", "start", ""]


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """The columns by which changes identify a row, from a position on.

    Attributes:
        position: of the first change.
        is_full: the publisher sends whole old rows.
        key: the columns of the replica identity; with whole old rows those of the primary key. Empty: not known.
    """

    position: Lsn
    is_full: bool
    key: tuple[str, ...]

    def has_key(self, names: Collection[str]) -> bool:
        """Return True if the old rows have these columns, and no two rows have the same values in them.

        With whole old rows, more columns than the primary key do. Without a known key, any columns may.
        """
        if not self.key:
            return True
        return set(names) >= set(self.key) if self.is_full else set(names) == set(self.key)


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """The start of a query, and the identities of each of its tables, oldest first."""

    begin: Begin
    tables: Mapping[str, tuple[RowIdentity, ...]]

    def add_to(self, schema: StructType) -> None:
        """Store the origin in the columns of a query, if they have `_seq`."""
        if COLUMN in schema.names:
            tables = {
                label: [astuple(identity) for identity in identities] for label, identities in self.tables.items()
            }
            schema[COLUMN].metadata = {_KEY: json.dumps({"begin": self.begin, "tables": tables})}

    @classmethod
    def of(cls, frame: DataFrame) -> StreamOrigin | None:
        """Return the origin of a DataFrame. None: it is not known."""
        text = frame.schema[COLUMN].metadata.get(_KEY)
        if text is None:
            return None
        fields = json.loads(text)
        tables = {
            label: tuple(RowIdentity(Lsn(position), is_full, tuple(key)) for position, is_full, key in identities)
            for label, identities in fields["tables"].items()
        }
        return cls(fields["begin"], tables)


def identities_after(identities: Iterable[RowIdentity], position: Lsn) -> tuple[RowIdentity, ...]:
    """Return the identities of the changes after a position, each of several equal ones once."""
    following = list(identities)
    first = max((index for index, identity in enumerate(following) if identity.position <= position), default=0)
    return tuple(next(same) for _, same in groupby(following[first:], key=lambda one: (one.is_full, one.key)))
