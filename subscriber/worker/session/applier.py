"""Applier: passes the changes of one stream of messages to one target.

The apply loop has an Applier for the replication stream. Each streamed transaction has another one for its file. The
apply worker reads the file when the transaction ends, or a parallel apply worker reads it earlier.

The Applier finds the mapping of a change and applies the hook of its table. The target does not handle hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.apply.batch.batch import AppendResult, CommitCallbacks
from subscriber.apply.batch.binary_types import text_format_reason
from subscriber.apply.dispatcher import Action, ApplyChange, Dispatcher, TruncateTables
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.apply.table_states import NOWHERE
from subscriber.apply.transaction import TransactionState
from subscriber.errors import MappingError, SubscriberError, TextNeeded
from subscriber.failpoints import Point, reach, reached
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.decode import Decoder, in_place
from subscriber.protocol.frontend import LARGE
from subscriber.protocol.messages import Delete, Insert, Message, Update
from subscriber.targets.base import Target
from subscriber.targets.postgres.session.error_context import add_context
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.worker.apply_hooks import ApplyRules, Undecided

# Precedes a stored message, because the target accepts payloads with this header.
_AS_SENT = XLOG_DATA_HEADER.pack(XLOG_DATA, 0, 0, 0)


@dataclass(slots=True)
class Counters:
    """Counts since the worker has started."""

    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    last_send_time: int = 0  # send time of the last message, microseconds since 2000-01-01 UTC
    latest_end: Lsn = NOWHERE  # WAL end in the last keepalive


class Applier:
    """Passes changes to a target, according to the rules of a worker.

    Attributes:
        dispatcher: checks the order of messages, and has the tables that the publisher has described.
    """

    def __init__(self, target: Target, dispatcher: Dispatcher, rules: ApplyRules, counters: Counters) -> None:
        self.dispatcher = dispatcher
        self._target = target
        self._rules = rules
        # Returns True if changes of a table may be applied without decoding them.
        self._allows_raw = rules.should_apply if rules.table_hooks is None else self._should_apply_raw
        self._counters = counters
        self._hooked: dict[int, TableHook] = {}  # by OID on the publisher
        self._hooked_oids: set[int] = set()  # OIDs of the same tables on the target

    def append_raw(self, waiting: deque[bytes], limit: int) -> int:
        """Pass changes of the open transaction from the front of `waiting` to the target, without decoding them.

        Target.flush_if_full() must be awaited after this call.

        Returns:
            The bytes that were taken. 0: handle() has to process the next message.
        """
        transaction = self.dispatcher.transaction
        if transaction is None or transaction.state is not TransactionState.APPLY:
            return 0
        taken = self._target.append_raw_changes(
            transaction, waiting, limit, self.dispatcher.relations, self._allows_raw
        )
        self._counters.changes += taken.changes
        return taken.bytes

    def append_raw_transactions(self, waiting: deque[bytes], limit: int, ends: CommitCallbacks) -> AppendResult | None:
        """Pass whole transactions from the front of `waiting` to the target. Returns None if it takes none."""
        taken = self._target.append_raw_transactions(waiting, limit, self.dispatcher.relations, self._allows_raw, ends)
        if taken is not None:
            self._counters.transactions += taken.transactions
            self._counters.changes += taken.changes
        return taken

    async def apply_spooled(self, messages: Sequence[bytes], decoder: Decoder) -> None:
        """Apply messages that were read from a spool file, in order."""
        # A large message is read alone. It is decoded in place, because the fast path would copy it.
        if len(messages[0]) > LARGE or not self._target.takes_payloads:
            for message in messages:
                await self.handle(decoder.decode(in_place(message)))
            return
        waiting = deque(_AS_SENT + message for message in messages)
        while waiting:
            if self.append_raw(waiting, len(waiting)):
                await self._target.flush_if_full()
            else:
                await self.handle(decoder.decode(waiting.popleft()[len(_AS_SENT) :]))

    def _should_apply_raw(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        return table.oid not in self._hooked_oids and self._rules.should_apply(table, finish_lsn)

    async def handle(self, message: Message) -> Action:
        """Apply a message if it is a change. Otherwise return the action that the caller has to run.

        Returns:
            None if nothing is left to do.

        Raises:
            ProtocolError: the message is out of order.
            SubscriberError: an error of the target or of a hook. A MappingError has its CONTEXT.
        """
        try:
            action = self.dispatcher.receive(message)
            if isinstance(action, ApplyChange):
                self._counters.changes += 1
                if action.transaction.state is TransactionState.APPLY:
                    await self._change(action)
                return None
            if isinstance(action, TruncateTables):
                self._counters.changes += 1
                if action.transaction.state is TransactionState.APPLY:
                    await self._truncate(action)
                return None
        except SubscriberError as error:
            self._add_context(error, message)
            raise
        return action

    async def _change(self, action: ApplyChange) -> None:
        relid = action.message.relid
        mapping = self.dispatcher.relations.get(relid)
        if mapping is None:
            if self._ignores(relid):
                return
            mapping = await self._map(relid)
        # Nothing is awaited between a decision and its effect.
        while isinstance(message := self._part(action, mapping), Undecided):
            await message.wait()
            await reached(Point.CHANGE_DELAYED)
            if message.maps_again:
                mapping = await self._map(relid)
        if message is not None:
            if self._hooked and (hook := self._hooked.get(message.relid)) is not None:
                hooked = await hook.change(message)
                if hooked is None:
                    return
                message = hooked
            await self._target.change(action.transaction, mapping, message)
            reach(Point.CHANGE_SENT, self._target.flush)

    def _part(self, action: ApplyChange, mapping: RelationMapping) -> Insert | Update | Delete | Undecided | None:
        """Return the part of a change that is to be applied. None: nothing."""
        if self._rules.should_apply(mapping.local, action.transaction.finish_lsn):
            return action.message
        return self._rules.change_during_copy(action.transaction, mapping, action.message)

    async def _truncate(self, action: TruncateTables) -> None:
        rules, transaction, relations = self._rules, action.transaction, self.dispatcher.relations
        relids = [relid for relid in action.message.relids if not self._ignores(relid)]
        mappings = [relations.get(relid) or await self._map(relid) for relid in relids]
        while True:
            copied = [table for table in mappings if not rules.should_apply(table.local, transaction.finish_lsn)]
            truncations = rules.truncate_during_copy(transaction, copied)
            if not isinstance(truncations, Undecided):
                break
            await truncations.wait()
            await reached(Point.CHANGE_DELAYED)
            if truncations.maps_again:
                mappings = [await self._map(relid) for relid in relids]
        effects = dict(zip((table.remote.relid for table in copied), truncations, strict=True))
        wanted = []
        for table in mappings:
            truncation = effects.get(table.remote.relid)
            if truncation is None or truncation.whole:
                wanted.append(table)
            else:
                await rules.delete_during_copy(transaction, table, truncation.conditions)
        if wanted:
            await self._target.truncate(transaction, wanted, action.message)

    def _ignores(self, relid: int) -> bool:
        return not self._target.accepts(self.dispatcher.relations.relation(relid))

    async def _map(self, relid: int) -> RelationMapping:
        relations = self.dispatcher.relations
        remote, hooks = relations.relation(relid), self._rules.table_hooks
        hook = bind(hooks, remote, self._target.codec) if hooks is not None else None
        mapping = await self._target.map_relation(remote if hook is None else hook.relation)
        if hook is not None:
            hook.fit(mapping)
            self._hooked[relid] = hook
            self._hooked_oids.add(mapping.local.oid)
        if self._rules.verify_binary_types and (why := text_format_reason(mapping)) is not None:
            raise TextNeeded(why)
        relations.put(mapping)
        return mapping

    def _add_context(self, error: SubscriberError, message: Message) -> None:
        if isinstance(error, MappingError) and not error.context:
            note = StatementContext(message.message_type, self.dispatcher.transaction)
            relid = getattr(message, "relid", None)
            if relid is not None:
                note.mapping = self.dispatcher.relations.get(relid)
            add_context(error, note, self._target.origin, self._target.wording)
