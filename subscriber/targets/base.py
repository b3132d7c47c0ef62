"""What the apply loop asks of a target; targets/postgres/row_applier.py is the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from subscriber.apply.batch.batch import AppendResult, CommitCallbacks
from subscriber.apply.relation_map import RelationMap, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, Update
from subscriber.targets.postgres.session.statement_context import Wants


class Target(Protocol):
    """Changes in the order they are given, transactions whole and in commit order.

    `change`, `empty` and `commit` may return before the target has done anything. A failure is raised by
    any later call, or by watch(); nothing after the failed transaction may then become visible.
    """

    @property
    def position(self) -> Lsn:
        """The end of the last transaction given to commit()."""

    @property
    def codec(self) -> str:
        """Of the texts that the target takes, see protocol/encodings.py."""

    async def map_relation(self, remote: Relation) -> RelationMapping:
        """Find the table for a published one. Raises MappingError."""

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        """Apply one row's change, opening the target's transaction if this is the first."""

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        """Truncate all of `mappings` together."""

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Commit the rows and the progress together; `on_committed` is called once that has succeeded.

        Where several transactions are committed together the last one's is called for all.
        Only for a transaction that changed something.
        """

    def append_raw_changes(
        self, transaction: RemoteTransaction, waiting: deque[bytes], limit: int, relations: RelationMap, wants: Wants
    ) -> tuple[int, int]:
        """Take changes of `transaction` off the front of `waiting`, as the walsender sent them: number and bytes.

        At most `limit`, and none where change() has to see the next one. `wants` says of which tables. Afterwards
        flush_if_full() has to be awaited.
        """

    def append_raw_transactions(
        self, waiting: deque[bytes], limit: int, relations: RelationMap, wants: Wants, ends: CommitCallbacks
    ) -> AppendResult | None:
        """Take whole transactions off the front of `waiting`, of up to `limit` changes in all, each as if committed.

        Only between transactions, and only those to whose end nobody attends. None where there are none to be taken.
        Afterwards flush_if_full() has to be awaited.
        """

    async def flush_if_full(self) -> None:
        """Do what was gathered if it is much."""

    async def on_idle(self) -> None:
        """The stream pauses: do what was gathered of complete transactions."""

    async def sync(self) -> None:
        """Wait until everything given so far has been done."""
