"""One stream of messages, one target: what the dispatcher says is to be done, is done.

The apply loop has one for what comes over the wire. Each streamed transaction has another for what was kept
of it, whether that is read when the transaction has committed or by a parallel apply worker before.

Here a change meets its mapping, and the hook of its table if the program has one: the target knows nothing of hooks.
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
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.decode import Decoder, in_place
from subscriber.protocol.frontend import LARGE
from subscriber.protocol.messages import Message
from subscriber.publisher.own_schema import OWN_SCHEMA
from subscriber.targets.base import Target
from subscriber.targets.postgres.session.error_context import add_context
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.worker.apply_hooks import ApplyRules

_AS_SENT = XLOG_DATA_HEADER.pack(XLOG_DATA, 0, 0, 0)  # in front of what was kept, as the target takes it


@dataclass(slots=True)
class Counters:
    """Since the worker started."""

    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    last_send_time: int = 0  # microseconds since 2000-01-01 UTC, of the last message
    latest_end: Lsn = NOWHERE  # of the last keepalive


class Applier:
    def __init__(self, target: Target, dispatcher: Dispatcher, rules: ApplyRules, counters: Counters) -> None:
        self.dispatcher = dispatcher
        self._target = target
        self._rules = rules
        # Whether the very bytes that were sent may be applied, without a look at them.
        self._allows_raw = rules.should_apply if rules.table_hooks is None else self._should_apply_raw
        self._counters = counters
        self._hooked: dict[int, TableHook] = {}  # by the publisher's OID
        self._hooked_oids: set[int] = set()  # the target's OIDs of the same tables

    def append_raw(self, waiting: deque[bytes], limit: int) -> int:
        """Have the target take changes off the front of `waiting`, as the walsender sent them; their bytes.

        0 where handle() has to see the next one. Afterwards the target wants flush_if_full().
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
        """Have the target take whole transactions in the same way."""
        taken = self._target.append_raw_transactions(waiting, limit, self.dispatcher.relations, self._allows_raw, ends)
        if taken is not None:
            self._counters.transactions += taken.transactions
            self._counters.changes += taken.changes
        return taken

    async def apply_spooled(self, messages: Sequence[bytes], decoder: Decoder) -> None:
        """The changes of `messages`, which a file had, one after another."""
        if len(messages[0]) > LARGE:  # it was read alone, and is not copied to be taken
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
        """Have the target do what `message` asks for, if it is a change; what is left to do about it, if not.

        Raises the errors of the dispatcher and the target, with their CONTEXT where it is known here.
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
        mapping = self.dispatcher.relations.get(action.message.relid)
        if mapping is None:
            if self._is_own(action.message.relid):
                return
            mapping = await self._map(action.message.relid)
        if self._rules.should_apply(mapping.local, action.transaction.finish_lsn):
            message = action.message
            if self._hooked and (hook := self._hooked.get(message.relid)) is not None:
                hooked = await hook.change(message)
                if hooked is None:
                    return
                message = hooked
            await self._target.change(action.transaction, mapping, message)
            reach(Point.CHANGE_SENT, self._target.flush)

    async def _truncate(self, action: TruncateTables) -> None:
        relations = self.dispatcher.relations
        relids = [relid for relid in action.message.relids if not self._is_own(relid)]
        mappings = [relations.get(relid) or await self._map(relid) for relid in relids]
        wanted = [m for m in mappings if self._rules.should_apply(m.local, action.transaction.finish_lsn)]
        if wanted:
            await self._target.truncate(action.transaction, wanted, action.message)

    def _is_own(self, relid: int) -> bool:
        """Whether the table is one of the publisher's subscriptions, see publisher/own_schema.py."""
        return self.dispatcher.relations.relation(relid).schema == OWN_SCHEMA

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
            add_context(error, note, self._target.origin)
