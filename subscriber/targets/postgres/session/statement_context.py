"""What a statement was for, and who is told when its answer needs attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Message
from subscriber.targets.postgres.sql.row_statements import Plan


@dataclass(slots=True, eq=False)
class Note:
    """What a statement was for: goes with its error, and with an answer that needs attention."""

    message: str  # the remote message's name, as "INSERT"
    transaction: RemoteTransaction | None = None
    mapping: RelationMapping | None = None
    change: Message | None = None
    plan: Plan | None = None
    resolved: bool = False  # the row was looked at before, so nothing is to be told of it
    own_first: bool = False  # without a key, a row that the transaction has made is to be found before any other
    may_be_stale: bool = False  # the mapping is an earlier transaction's, and its shape is not checked yet


Wants = Callable[[LocalRelation, Lsn], bool]  # (target table, finish LSN) -> whether its changes are ours to apply
OnConflict = Callable[[Conflict, Note], None]
