"""Quarantine: a transaction that cannot be applied waits on the target, with those that depend on it.

Purpose. With on_error = quarantine, a permanent error of a transaction restarts the worker, which parks the
transaction: it stores the messages in `subscriber.quarantine` instead of applying them. While a transaction is parked,
the worker collects each later one before it applies any of its changes. If its rows meet those of a parked transaction
(apply/held_rows.py), it is parked as well. All others are applied. ALTER SUBSCRIPTION … QUARANTINE RETRY has the worker
apply parked transactions, in the publisher's order, through the same Applier as the stream.

Invariants.

- The transaction of the target that stores the messages also moves the progress record. The one that applies a parked
  transaction also removes it. So each transaction is applied once, or parked once.
- Messages are stored as they arrived, with the descriptions of their tables. Changes of tables that another worker
  synchronizes are left out: the apply worker would not apply them either.
- If a parked transaction depends on another one, it is not retried before that one has been applied or discarded.
- Parked transactions count whether or not on_error is still quarantine.
- Nothing of this is used while nothing is parked: the apply loop takes its fast path.

Failure cases.

- Worker killed after the error, before it has parked the transaction: the next worker meets the same error.
- Worker killed between parking and commit: the target rolls both back. After the commit: the stream starts after the
  transaction.
- Worker killed during a retry: the transaction is still parked, and still requested.
- Retry fails: its transaction is rolled back. The worker restarts, stores the error and continues with the stream. The
  transactions that depend on it stay.
- Statement edits or discards a transaction while the worker retries it: unpark() fails, and the worker reads the
  quarantine again.
- Table described differently later (DDL on the publisher): the parked messages keep the description of their time.
- TRUNCATE: claims the whole table, and references to it.
- Table that is synchronized again after a transaction was parked: its copy has the changes, so the retry leaves them
  out (TableStates.applies()).
- Transaction larger than `quarantine_transaction_size` that is not streamed: the worker stops, and names the setting.
- Quarantine with `quarantine_limit` transactions or `quarantine_rows` rows: the next transaction stops the stream, as
  without quarantine.

An UPDATE or DELETE whose former row was not sent frees values of other unique indexes that are not known here. A later
transaction that takes such a value fails with a unique violation, and is parked with that error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from subscriber import telemetry
from subscriber.apply.held_rows import Claims, HeldRows
from subscriber.apply.relation_map import RelationMap
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import quarantine as store
from subscriber.catalog.store.quarantine import QuarantinedTransaction
from subscriber.catalog.store.row_dependencies import find_foreign_effects, find_row_dependencies
from subscriber.display import sql_identifier
from subscriber.errors import ApplyError, MappingError, SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Delete, Insert, Message, Relation, Truncate, Update, moment
from subscriber.remedy import Remedy
from subscriber.retry import Reaction
from subscriber.settings import Settings
from subscriber.spool.record_format import HEADER, HEADER_SIZE
from subscriber.sqlstate import CONFIGURATION_LIMIT_EXCEEDED, QUARANTINE_FULL
from subscriber.subscription import OnError, Subscription
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.timestamps import EPOCH
from subscriber.worker.apply.quarantine_claims import ClaimedTable, claimed_table
from subscriber.worker.apply_hooks import ApplyRules

Messages: TypeAlias = Callable[[], AsyncIterator[list[bytes]]]  # the messages of a transaction between BEGIN and COMMIT

_CHANGES = b"IUD"
_RELATION = ord("R")
_TRUNCATE = ord("T")


@dataclass(frozen=True, slots=True)
class FailedTransaction:
    """A transaction that could not be applied. `shown` is the error without values of rows, for the log."""

    finish_lsn: Lsn
    error: str
    detail: str | None
    shown: str

    @classmethod
    def of(cls, finish_lsn: Lsn, error: SubscriberError) -> FailedTransaction:
        """Return the transaction that has failed with an error."""
        return cls(finish_lsn, error.message, error.detail, telemetry.message_without_values(error))


@dataclass(slots=True)
class QuarantineMemory:
    """The knowledge that an apply worker leaves to the next one.

    Attributes:
        failed: the transaction that the next worker has to park. None: there is none.
        failed_retry: a parked transaction whose retry has failed, until the error is stored.
        retrying: the parked transaction that the worker is retrying.
        is_stale: a statement may have changed the quarantine.
        claims: the claims of parked transactions, by finish LSN, with the number of edits.
        keeps_claims: the next worker may use `claims`, because only a transaction has ended this one.
    """

    failed: FailedTransaction | None = None
    failed_retry: FailedTransaction | None = None
    retrying: Lsn | None = None
    is_stale: bool = False
    claims: dict[Lsn, tuple[int, Claims]] = field(default_factory=dict)
    keeps_claims: bool = False

    def begin(self) -> None:
        """A worker begins, and takes over the claims if the former one has left them for it."""
        self.retrying = None
        if not self.keeps_claims:
            self.claims.clear()
        self.keeps_claims = False

    def park_nothing(self) -> None:
        """The transaction that failed is parked, or is not to be."""
        self.failed = None

    def take_failed_retry(self) -> FailedTransaction | None:
        """Return the retry that has failed, to be stored. None: there is none."""
        failed, self.failed_retry = self.failed_retry, None
        return failed

    def retry(self, finish_lsn: Lsn | None) -> None:
        """An error of the worker is now that of the retry of this parked transaction. None: of none."""
        self.retrying = finish_lsn

    def mark(self, *, stale: bool) -> None:
        """Record if a statement may have changed the quarantine since it was read."""
        self.is_stale = stale

    def takes(self, error: BaseException, how: Reaction, on_error: OnError) -> bool:
        """Record an error of the worker if quarantine is the reaction. Returns True to restart the worker immediately.

        Args:
            error: the error.
            how: the reaction to this kind of error.
            on_error: the subscription's option.
        """
        if how is not Reaction.INTERVAL or not isinstance(error, SubscriberError):
            return False
        if self.retrying is not None:
            self.failed_retry = FailedTransaction.of(self.retrying, error)
            self.retrying = None
            self.keeps_claims = True
            return True
        parking, self.failed = self.failed, None
        if on_error is not OnError.QUARANTINE or error.finish_lsn is None or error.sqlstate == QUARANTINE_FULL:
            return False
        if parking is not None and parking.finish_lsn == error.finish_lsn:
            return False  # it could not be parked
        self.failed = FailedTransaction.of(Lsn(error.finish_lsn), error)
        self.keeps_claims = True
        return True


@dataclass(slots=True)
class Parking:
    """The reason to park a transaction, and its contents."""

    error: FailedTransaction | None
    depends_on: set[Lsn]
    claims: Claims
    relations: dict[str, None] = field(default_factory=dict)  # names, in the order of the changes
    described: list[bytes] = field(default_factory=list)  # RELATION messages from before the transaction
    changes: int = 0
    bytes: int = 0  # of the messages


class Quarantine:
    """The parked transactions of one apply worker. One task makes all calls."""

    def __init__(
        self,
        subscription: Subscription,
        catalog: CatalogConnection,
        target: PostgresTarget,
        rules: ApplyRules,
        memory: QuarantineMemory,
        settings: Settings,
    ) -> None:
        self.largest = settings.quarantine_transaction_size
        self._most_rows = settings.quarantine_rows
        self._subscription = subscription
        self._catalog = catalog
        self._target = target
        self._rules = rules
        self._memory = memory
        self._held = HeldRows()
        self._parked: dict[Lsn, QuarantinedTransaction] = {}
        self._tables: dict[int, ClaimedTable] = {}  # by OID on the publisher

    @classmethod
    async def open(
        cls,
        subscription: Subscription,
        catalog: CatalogConnection,
        target: PostgresTarget,
        rules: ApplyRules,
        memory: QuarantineMemory,
        settings: Settings,
    ) -> Quarantine | None:
        """Load the quarantine of a subscription. Returns None if it has none, and on_error does not ask for one.

        Raises:
            ApplyError: hooks, triggers or rules have effects on rows that are not known.
        """
        wanted = subscription.on_error is OnError.QUARANTINE
        if not wanted:
            memory.park_nothing()
        async with catalog.use() as connection:
            if not wanted and not await store.count(connection, subscription.oid):
                return None
            if (failed := memory.take_failed_retry()) is not None:
                await store.retry_failed(connection, subscription.oid, failed.finish_lsn, failed.error, failed.detail)
            effects = await find_foreign_effects(
                connection, subscription.oid, replica_role=target.session.capabilities.replica_role
            )
        memory.begin()
        refuse_unknown_effects(subscription, rules, effects)
        quarantine = cls(subscription, catalog, target, rules, memory, settings)
        await quarantine.reload()
        memory.mark(stale=any(parked.retry for parked in quarantine._parked.values()))
        return quarantine

    @property
    def is_active(self) -> bool:
        """True if transactions have to be collected: one is parked, or is to be."""
        return bool(self._parked) or self._memory.failed is not None

    @property
    def is_stale(self) -> bool:
        """True if a statement may have changed the quarantine."""
        return self._memory.is_stale

    # --- the stored transactions --------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the quarantine, and find the rows that its transactions hold."""
        self._memory.mark(stale=False)
        async with self._catalog.use() as connection:
            rows = await store.load(connection, self._subscription.oid)
        await reached(Point.QUARANTINE_READ)
        by_lsn = {row.finish_lsn: row for row in rows}
        for lsn, known in list(self._parked.items()):
            if lsn not in by_lsn or by_lsn[lsn].edited != known.edited:
                self._held.remove(lsn)
                self._memory.claims.pop(lsn, None)
        for lsn, row in by_lsn.items():
            if lsn not in self._held.claims:
                edits, claims = self._memory.claims.get(lsn, (-1, None))
                if claims is None or edits != row.edited:
                    claims = await self._claims_of(row)
                self._hold(row.finish_lsn, row.edited, claims)
        self._parked = by_lsn
        self._check_size()

    def _hold(self, lsn: Lsn, edits: int, claims: Claims) -> None:
        self._held.add(lsn, claims)
        self._memory.claims[lsn] = (edits, claims)

    async def _claims_of(self, parked: QuarantinedTransaction) -> Claims:
        relations: dict[int, Relation] = {}
        claims, decoder = Claims(), Decoder()
        async for messages in self.messages(parked):
            for payload in messages:
                await self._claim(claims, decoder.decode(payload), relations, parked.finish_lsn)
        return claims

    async def _claim(
        self, claims: Claims, message: Message, relations: dict[int, Relation], finish_lsn: Lsn
    ) -> list[ClaimedTable]:
        """Add the claims of one message. Returns the tables that it changes."""
        match message:
            case Relation():
                relations[message.relid] = message
            case Insert() | Update() | Delete():
                table = await self._table(relations[message.relid])
                if self._applies(table, finish_lsn):
                    table.change(claims, message)
                    return [table]
            case Truncate():
                tables = [await self._table(relations[relid]) for relid in message.relids]
                wanted = [table for table in tables if self._applies(table, finish_lsn)]
                for table in wanted:
                    table.truncate(claims)
                return wanted
        return []

    def _applies(self, table: ClaimedTable, finish_lsn: Lsn) -> bool:
        return table.local is None or self._rules.should_apply(table.local, finish_lsn)

    async def _table(self, relation: Relation) -> ClaimedTable:
        known = self._tables.get(relation.relid)
        if known is not None and known.relation == relation:
            return known
        table = ClaimedTable(relation, None, name=f"{relation.schema}.{relation.name}")
        try:
            mapping = await self._target.map_relation(relation)
        except MappingError:
            return table  # not kept, because the target's table may be created or altered
        async with self._catalog.use() as connection:
            dependencies = await find_row_dependencies(connection, mapping.local.schema, mapping.local.name)
        if dependencies is not None:
            search = None if mapping.unsearchable is not None else mapping.search
            table = claimed_table(relation, mapping.local, search, dependencies)
            self._tables[relation.relid] = table
        return table

    async def messages(self, parked: QuarantinedTransaction) -> AsyncIterator[list[bytes]]:
        """Yield the stored messages of a transaction, in chunks."""
        place = 0
        while True:
            async with self._catalog.use() as connection:
                messages, place = await store.read_messages(
                    connection, self._subscription.oid, parked.finish_lsn, place
                )
            if not messages:
                return
            yield messages

    def _check_size(self) -> None:
        if self._held.size > self._most_rows:
            raise ApplyError(
                f'quarantined transactions of subscription "{self._subscription.name}" hold more than'
                f" {self._most_rows} rows",
                detail=f"They hold {self._held.size} rows, which the worker has in memory.",
                hint=Remedy(
                    "repair the cause, then",
                    self._statement("RETRY"),
                    alternative=Remedy("raise the setting quarantine_rows."),
                ),
                sqlstate=QUARANTINE_FULL,
            )

    def _statement(self, action: str) -> str:
        return f"ALTER SUBSCRIPTION {sql_identifier(self._subscription.name)} QUARANTINE {action};"

    # --- the transactions of the stream -------------------------------------------------------------

    async def examine(self, transaction: RemoteTransaction, messages: Messages, known: RelationMap) -> Parking | None:
        """Decide about a complete transaction before any of its changes is applied.

        Args:
            transaction: the transaction.
            messages: reads its messages, which are not changed.
            known: the tables that the publisher described before it.

        Returns:
            The reason to park it. None: it is independent of all parked transactions.
        """
        failed = self._memory.failed
        has_failed = failed is not None and failed.finish_lsn == transaction.finish_lsn
        depends_on = set() if has_failed else await self._dependencies(transaction, messages, known)
        if not has_failed and not depends_on:
            return None
        parking = Parking(failed if has_failed else None, depends_on, Claims())
        relations: dict[int, Relation] = {}
        decoder = Decoder()
        async for chunk in messages():
            for payload in chunk:
                message = decoder.decode(payload)
                parking.bytes += HEADER_SIZE + len(payload)
                for relid in _relids(message):
                    if relid not in relations:
                        relations[relid] = known.relation(relid)
                        parking.described.append(_record(encode(relations[relid])))
                if isinstance(message, Relation):
                    message = message.recoded(self._target.codec)
                tables = await self._claim(parking.claims, message, relations, transaction.finish_lsn)
                parking.changes += bool(tables)
                parking.relations |= dict.fromkeys(
                    f"{claimed.relation.schema}.{claimed.relation.name}" for claimed in tables
                )
        parking.depends_on |= self._held.find(parking.claims)
        return parking

    async def _dependencies(self, transaction: RemoteTransaction, messages: Messages, known: RelationMap) -> set[Lsn]:
        """Find the parked transactions that this one depends on. Decodes changes of tables that they concern only."""
        relations: dict[int, Relation] = {}
        concerned: dict[int, bool] = {}
        claims, decoder = Claims(), Decoder()
        async for chunk in messages():
            for payload in chunk:
                letter = payload[0]
                if letter in _CHANGES:
                    relid = int.from_bytes(payload[1:5], "big")
                    if relid not in concerned:
                        relation = relations.get(relid) or known.relation(relid)
                        relations[relid] = relation
                        concerned[relid] = self._concerns(await self._table(relation))
                    if not concerned[relid]:
                        continue
                elif letter == _RELATION:
                    described = self._relation(decoder, payload)
                    relations[described.relid] = described
                    concerned.pop(described.relid, None)
                    continue
                elif letter != _TRUNCATE:
                    continue
                message = decoder.decode(payload)
                for relid in _relids(message):
                    if relid not in relations:
                        relations[relid] = known.relation(relid)
                await self._claim(claims, message, relations, transaction.finish_lsn)
        return self._held.find(claims)

    def _relation(self, decoder: Decoder, payload: bytes) -> Relation:
        relation = decoder.decode(payload)
        assert isinstance(relation, Relation)
        return relation.recoded(self._target.codec)

    def _concerns(self, table: ClaimedTable) -> bool:
        held = self._held
        if table.local is None:
            return held.has_name(table.name)
        named = held.has_name(f"{table.relation.schema}.{table.relation.name}")
        return named or held.has_table(table.table) or any(held.has_foreign_key(key) for key in table.foreign_keys)

    async def park(
        self, transaction: RemoteTransaction, parking: Parking, messages: Messages, relations: RelationMap
    ) -> None:
        """Queue the statements that park a transaction. The caller commits it.

        Args:
            transaction: the transaction, which has no statement on the target.
            parking: the result of examine().
            messages: reads its messages.
            relations: takes over the descriptions of tables, because the publisher does not repeat them.

        Raises:
            ApplyError: the rows of all parked transactions are too many.
        """
        lsn, error = transaction.finish_lsn, parking.error
        self._memory.park_nothing()
        await self._target.leave_batch_mode(transaction)
        row = {
            "finish_lsn": str(lsn),
            "remote_xid": transaction.xid,
            "commit_time": moment(transaction.commit_time).isoformat(),
            "relations": [*parking.relations],
            "changes": parking.changes,
            "bytes": parking.bytes,
            "depends_on": [str(earlier) for earlier in sorted(parking.depends_on)],
            "error": error and error.error,
            "error_detail": error and error.detail,
        }
        self._hold(lsn, 0, parking.claims)
        self._check_size()
        applier = self._target.row_applier
        # JSON on the server has no surrogates, which stand for bytes that are no text.
        described_row = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode()
        applier.execute_at_end(transaction, store.PARK, described_row)
        records = b"".join(parking.described)
        place, decoder = 0, Decoder()
        described: dict[int, Relation] = {}
        async for chunk in messages():
            for payload in chunk:
                if payload[0] == _RELATION:
                    relation = self._relation(decoder, payload)
                    described[relation.relid] = relation
                    relations.update(relation)
                    records += _record(encode(relation))
                elif await self._is_applied(payload, described, relations, transaction):
                    records += _record(payload)
            await _park_content(applier, transaction, place, records)
            place, records = place + len(records), b""
        if records:
            await _park_content(applier, transaction, place, records)
        self._parked[lsn] = _as_row(transaction, parking)
        telemetry.log(
            telemetry.LOG,
            f"transaction {transaction.xid}, finished at {lsn}, is put in quarantine",
            detail=f"It depends on {_listed(parking.depends_on)}."
            if error is None
            else f"It has failed: {error.shown}.",
            exact_detail=None if error is None else f"It has failed: {error.error}.",
            hint=Remedy("repair the cause, then", self._statement("RETRY")),
            event="quarantine.parked",
            xid=transaction.xid,
            finish_lsn=lsn,
        )

    async def _is_applied(
        self, payload: bytes, described: dict[int, Relation], known: RelationMap, transaction: RemoteTransaction
    ) -> bool:
        """Return True if the message is a change that the apply worker would apply."""
        if payload[0] not in _CHANGES:
            return payload[0] == _TRUNCATE
        relid = int.from_bytes(payload[1:5], "big")
        table = await self._table(described.get(relid) or known.relation(relid))
        return self._applies(table, transaction.finish_lsn)

    # --- retry --------------------------------------------------------------------------------------

    async def next_retry(self) -> QuarantinedTransaction | None:
        """Return the first transaction that a statement wants to be retried and that can be. None: there is none."""
        if self._memory.is_stale:
            await self.reload()
        requested = [parked for parked in self._parked.values() if parked.retry]
        for parked in requested:
            if parked.depends_on.isdisjoint(self._parked):
                return parked
        if requested:
            async with self._catalog.use() as connection:
                waiting = [parked.finish_lsn for parked in requested]
                await store.cancel_retry(connection, self._subscription.oid, waiting)
            await self.reload()
        return None

    def begin_retry(self, parked: QuarantinedTransaction) -> RemoteTransaction:
        """Return the transaction to apply. An error of the worker is that of this retry until retried()."""
        self._memory.retry(parked.finish_lsn)
        committed = 0 if parked.commit_time is None else (parked.commit_time - EPOCH) // timedelta(microseconds=1)
        return RemoteTransaction(parked.xid, parked.finish_lsn, committed)

    async def end_retry(self, transaction: RemoteTransaction, parked: QuarantinedTransaction) -> None:
        """Queue the statement that removes a transaction. The caller commits it, with the transaction's changes."""
        await self._target.leave_batch_mode(transaction)
        self._target.row_applier.execute_at_end(
            transaction, store.UNPARK, str(transaction.finish_lsn), str(parked.edited)
        )

    def retried(self, parked: QuarantinedTransaction) -> None:
        """A parked transaction has been applied, and removed from the catalog."""
        self._memory.retry(None)
        self._held.remove(parked.finish_lsn)
        self._memory.claims.pop(parked.finish_lsn, None)
        del self._parked[parked.finish_lsn]
        telemetry.log(
            telemetry.LOG,
            f"transaction {parked.xid}, finished at {parked.finish_lsn}, is applied after quarantine",
            event="quarantine.applied",
            xid=parked.xid,
            finish_lsn=parked.finish_lsn,
        )

    def too_large(self, transaction: RemoteTransaction) -> SubscriberError:
        """Return the error for a transaction that cannot be collected."""
        name = sql_identifier(self._subscription.name)
        return ApplyError(
            f"transaction {transaction.xid}, finished at {transaction.finish_lsn}, is too large to be compared with"
            " transactions in quarantine",
            detail=f"It has more than {self.largest} bytes, and the publisher does not stream it.",
            hint=Remedy(
                command=f"ALTER SUBSCRIPTION {name} SET (streaming = on);",
                alternative=Remedy("raise the setting quarantine_transaction_size."),
            ),
            sqlstate=CONFIGURATION_LIMIT_EXCEEDED,
        )


def refuse_unknown_effects(subscription: Subscription, rules: ApplyRules, effects: list[str]) -> None:
    """Refuse quarantine if changes have effects on rows that are not known.

    Args:
        subscription: the subscription.
        rules: the worker's rules, which have its hooks.
        effects: triggers and rules of the target's tables.

    Raises:
        ApplyError: there are any.
    """
    name = sql_identifier(subscription.name)
    statement = f"ALTER SUBSCRIPTION {name} SET (on_error = 'retry');"
    without = Remedy(f"when {name} has nothing in quarantine", statement)
    if rules.table_hooks is not None:
        raise ApplyError(
            f'subscription "{subscription.name}" has hooks and on_error = quarantine',
            detail="The rows that a hook reads or writes are not known, so dependent transactions cannot be found.",
            hint=Remedy("run the subscription without hooks.", alternative=without),
            sqlstate=CONFIGURATION_LIMIT_EXCEEDED,
        )
    if effects:
        raise ApplyError(
            f'subscription "{subscription.name}" has on_error = quarantine and tables with triggers or rules',
            detail=f"They run for replicated changes, and the rows that they change are not known:"
            f" {', '.join(effects)}.",
            hint=Remedy(
                "disable them for replication with ALTER TABLE … DISABLE TRIGGER or ENABLE TRIGGER, which excludes"
                " replicated changes.",
                alternative=without,
            ),
            sqlstate=CONFIGURATION_LIMIT_EXCEEDED,
        )


def _relids(message: Message) -> tuple[int, ...]:
    match message:
        case Insert() | Update() | Delete():
            return (message.relid,)
        case Truncate():
            return tuple(message.relids)
    return ()


async def _park_content(applier: RowApplier, transaction: RemoteTransaction, place: int, records: bytes) -> None:
    """Add messages of a transaction that was put in quarantine, at an offset."""
    values = str(transaction.finish_lsn), str(place), rf"\x{records.hex()}"
    applier.execute_at_end(transaction, store.PARK_CONTENT, *values)
    await applier.session.pipeline.drain()


def _record(message: bytes) -> bytes:
    return HEADER.pack(len(message), 0) + message


def _listed(lsns: set[Lsn]) -> str:
    shown = ", ".join(str(lsn) for lsn in sorted(lsns)[:3])
    return f"{shown}, and {len(lsns) - 3} more" if len(lsns) > 3 else shown


def _as_row(transaction: RemoteTransaction, parking: Parking) -> QuarantinedTransaction:
    """Return the row of a transaction that is being parked, apart from the time."""
    committed = moment(transaction.commit_time)
    return QuarantinedTransaction(
        transaction.finish_lsn,
        transaction.xid,
        committed,
        committed,
        tuple(parking.relations),
        parking.changes,
        parking.bytes,
        frozenset(parking.depends_on),
        None if parking.error is None else parking.error.error,
        None if parking.error is None else parking.error.detail,
        attempts=0,
        retry=False,
        edited=0,
    )
