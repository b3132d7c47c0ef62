"""Messages of a small publisher in pgoutput's format."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.lsn import Lsn
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Insert,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Type,
)
from subscriber.protocol.tuple_data import TupleData

START = Lsn(0x1000)


def relation(relid: int, columns: int = 2) -> Relation:
    names = [RelationColumn(number == 0, f"c{number}", 25, -1) for number in range(columns)]
    return Relation(None, relid, "public", f"t{relid}", ReplicaIdentity.DEFAULT, tuple(names))


class Writer:
    """Makes transactions whose positions rise. `described` are the relations of this session so far."""

    def __init__(self, position: Lsn = START) -> None:
        self.position = position
        self.described: set[int] = set()
        self.xid = 700

    def transaction(self, rows: Sequence[tuple[int, int]], *, describe: bool = False) -> list[bytes]:
        """Return one transaction with a row of `size` bytes in `relid` for each (relid, size)."""
        self.xid += 1
        final, end = Lsn(self.position + 100), Lsn(self.position + 150)
        self.position = end
        messages = [encode(Begin(final, self.xid * 1000, self.xid))]
        for number, (relid, size) in enumerate(rows):
            if relid not in self.described or describe:
                self.described.add(relid)
                messages += [encode(Type(None, 16500, "public", "mood")), encode(relation(relid))]
            row = TupleData.join(b"tt", [str(number).encode(), b"x" * size])
            messages.append(encode(Insert(None, relid, row)))
        return [*messages, encode(Commit(final, end, self.xid * 1000))]
