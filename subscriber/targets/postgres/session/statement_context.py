"""Context of a pipelined statement: the change it belongs to, and the callback for an unexpected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.protocol.messages import Message
from subscriber.targets.postgres.sql.row_statements import Plan


@dataclass(slots=True, eq=False)
class StatementContext:
    """The purpose of a statement. Its error has it, and so has an answer that the caller processes."""

    message: str  # the remote message's name, as "INSERT"
    transaction: RemoteTransaction | None = None
    mapping: RelationMapping | None = None
    change: Message | None = None
    plan: Plan | None = None
    conflict_checked: bool = False  # the row was read before, so the result needs no report
    prefer_own_rows: bool = False  # without a key, prefer rows that the transaction itself has made
    schema_unchecked: bool = False  # the mapping is an earlier transaction's, and its shape is not checked yet


OnConflict = Callable[[Conflict, StatementContext], None]
