"""One stream of messages, one target: what the dispatcher says is to be done, is done.

The apply loop has one for what comes over the wire. Each streamed transaction has another for what was kept
of it, whether that is read when the transaction has committed or by a parallel apply worker before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subscriber.apply.dispatcher import Action, Change, Dispatcher, Empty
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.subrel import NOWHERE
from subscriber.errors import MappingError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Message
from subscriber.target.note import Note
from subscriber.target.postgres import PostgresTarget
from subscriber.worker.failpoints import Point, reach

Wants = Callable[[int, Lsn], bool]  # (target table's OID, finish LSN) -> whether its changes are ours to apply


@dataclass(slots=True)
class Counters:
    """Since the worker started."""

    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    last_send_time: int = 0  # microseconds since 2000-01-01 UTC, of the last message
    latest_end: Lsn = NOWHERE  # of the last keepalive


class Applier:
    def __init__(self, target: PostgresTarget, dispatcher: Dispatcher, wants: Wants, counters: Counters) -> None:
        self.dispatcher = dispatcher
        self._target = target
        self._wants = wants
        self._counters = counters

    async def handle(self, message: Message) -> Action:
        """Have the target do what `message` asks for, if it is a change; what is left to do about it, if not.

        Raises the errors of the dispatcher and the target, with their CONTEXT where it is known here.
        """
        try:
            action = self.dispatcher.receive(message)
            if isinstance(action, Change):
                self._counters.changes += 1
                if not action.transaction.passed_over:
                    await self._change(action)
                return None
            if isinstance(action, Empty):
                self._counters.changes += 1
                if not action.transaction.passed_over:
                    await self._empty(action)
                return None
        except SubscriberError as error:
            self._add_context(error, message)
            raise
        return action

    async def _change(self, action: Change) -> None:
        mapping = self.dispatcher.relations.get(action.message.relid)
        if mapping is None:
            mapping = await self._map(action.message.relid)
        if self._wants(mapping.local.oid, action.transaction.finish_lsn):
            await self._target.change(action.transaction, mapping, action.message)
            reach(Point.CHANGE_SENT, self._target.pipeline.flush)

    async def _empty(self, action: Empty) -> None:
        relations = self.dispatcher.relations
        mappings = [relations.get(relid) or await self._map(relid) for relid in action.message.relids]
        wanted = [m for m in mappings if self._wants(m.local.oid, action.transaction.finish_lsn)]
        if wanted:
            await self._target.empty(action.transaction, wanted, action.message)

    async def _map(self, relid: int) -> RelationMapping:
        relations = self.dispatcher.relations
        mapping = await self._target.map(relations.relation(relid))
        relations.put(mapping)
        return mapping

    def _add_context(self, error: SubscriberError, message: Message) -> None:
        if isinstance(error, MappingError) and not error.context:
            note = Note(message.message_type, self.dispatcher.transaction)
            relid = getattr(message, "relid", None)
            if relid is not None:
                note.mapping = self.dispatcher.relations.get(relid)
            self._target.add_context(error, note)
