"""WalBudgetMonitor: gives a subscription up before the WAL that it keeps fills the publisher's disk (`wal_budget`).

**Purpose.** A slot keeps WAL while its subscription is disabled, fails, or is slow. With a budget, the launcher drops
the slot when it keeps more. The publisher continues to run, and the subscription has to be reseeded. The status
warns before.

    measure      every wal_budget_interval, for each subscription with a budget, enabled or not
    mark         the budget is exceeded in two measurements: one transaction disables the subscription, and stores why
    drop         its slot and those of its table synchronization, when no walsender uses them

**Invariants.**

- The reason is committed before a slot is dropped. It stays until ENABLE or `subscriber reseed`, also after a crash.
- Slots are dropped on the subscription's publisher only, by its system identifier, and only while the row of the
  subscription is locked, marked and disabled. So a statement cannot give it another slot meanwhile.
- The progress record stays. A slot that is created by hand is ahead of it, so a worker refuses the slot (TargetBehind).
- A slot that is in use is not dropped.

**Failure cases.**

- The launcher is killed after the mark: the next launcher finds the slots over the budget, and drops them.
- The publisher cannot be reached, or refuses: nothing is changed, and the next measurement follows. A mark stays, so
  the status shows a subscription that was given up, whose slot exists. ENABLE continues it without a loss.
- A walsender does not notice the end of its connection: the slot is dropped after the publisher's wal_sender_timeout.
- The address leads to another server than before: a warning, and no change.
- No launcher runs: the WAL is not measured. max_slot_wal_keep_size of the publisher has no such condition.
- `subscriber hand-back` has disabled the subscription: PostgreSQL is about to use the slot, so it is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from subscriber import formatting, names, telemetry
from subscriber.catalog import native_subscription
from subscriber.catalog.commands import publisher_connection
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.native_subscription import Move
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscriptions import give_up, load_subscriptions, lock_given_up
from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.errors import SlotLost, SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.publisher.answers import parsing, signed
from subscriber.publisher.connection import Publisher
from subscriber.quoting import literal
from subscriber.subscription import Subscription
from subscriber.worker.context import LauncherContext
from subscriber.worker.error_hints import add_hint

APPLICATION_NAME = "subscriber wal budget"
MEASUREMENTS = 2  # over the budget, one after the other
DROP_TIMEOUT = 15.0  # seconds for the walsenders to end
POLL = 0.5  # seconds
CONNECT_TIMEOUT = 10.0  # seconds

_SLOTS = """
SELECT s.slot_name, s.active,
       pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                                       ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::bigint
  FROM pg_catalog.pg_replication_slots s
 WHERE (s.slot_name = {slot} OR pg_catalog.starts_with(s.slot_name, {prefix}))
       AND s.database = pg_catalog.current_database() AND s.plugin = 'pgoutput' AND s.restart_lsn IS NOT NULL
"""
_DROP = "SELECT pg_catalog.pg_drop_replication_slot({slot})"


@dataclass(frozen=True, slots=True)
class KeptWal:
    """The WAL that a slot keeps, in bytes."""

    slot: str
    is_active: bool
    bytes: int


class WalBudgetMonitor:
    """Measures the subscriptions of one target that have a budget, and gives up those that exceed it."""

    def __init__(self, context: LauncherContext) -> None:
        self._context = context
        self._exceeded: dict[int, int] = {}  # measurements over the budget, by OID of the subscription
        self._said: dict[int, str] = {}  # the last warning, by OID of the subscription

    async def run(self) -> None:
        """Measure until canceled. An error is logged once, and the measurement repeated."""
        while True:
            await anyio.sleep(self._context.settings.wal_budget_interval)
            try:
                await self.measure()
            except Exception as error:
                if isinstance(error, SubscriberError | OSError):
                    telemetry.log(telemetry.DEBUG, f"could not read the budgets of WAL: {error}")
                else:
                    telemetry.log_error(error)

    async def measure(self) -> None:
        """Measure all subscriptions with a budget once, concurrently.

        Raises:
            SubscriberError: the target cannot be read.
        """
        async with self._context.catalog.use() as connection:
            subscriptions = await load_subscriptions(connection)
            marks = await native_subscription.load_marks(connection)
        handed_back = {name for name, mark in marks.items() if mark is not None and mark.move is Move.HAND_BACK}
        measured = [s for s in subscriptions if s.wal_budget_bytes and s.slot_name and s.name not in handed_back]
        self._exceeded = {s.oid: self._exceeded.get(s.oid, 0) for s in measured}
        async with anyio.create_task_group() as tasks:
            for subscription in measured:
                tasks.start_soon(self._measure, subscription)

    async def _measure(self, subscription: Subscription) -> None:
        """Measure one subscription. No error leaves this method."""
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                async with await open_session(
                    subscription.conninfo,
                    application_name=APPLICATION_NAME,
                    must_use_password=subscription.must_use_password,
                    timeout=CONNECT_TIMEOUT,
                ) as session:
                    largest = _largest(await self._kept(session, subscription))
            if largest is None or largest.bytes <= (subscription.wal_budget_bytes or 0):
                self._exceeded[subscription.oid] = 0
                self._said.pop(subscription.oid, None)
                return
            self._exceeded[subscription.oid] += 1
            if self._exceeded[subscription.oid] >= MEASUREMENTS:
                await self._give_up(subscription, largest)
        except TimeoutError:
            self._warn(subscription, f"the publisher did not answer within {CONNECT_TIMEOUT:.0f} s")
        except SubscriberError as error:
            self._warn(subscription, error.message)
        except Exception as error:
            telemetry.log_error(error)

    async def _kept(self, session: Session, subscription: Subscription) -> list[KeptWal]:
        """Return the WAL that each slot of a subscription keeps."""
        prefix = names.table_sync_slot_prefix(subscription.oid)
        slot = subscription.slot_name or ""
        rows = await session.rows(_SLOTS.format(slot=literal(slot), prefix=literal(prefix)))
        with parsing("the WAL that its slots keep"):
            slots = [KeptWal(name or "", active == "t", signed(kept)) for name, active, kept in rows]
        sync_id = self._context.sync_id
        return [
            kept_wal
            for kept_wal in slots
            if kept_wal.slot == slot or names.table_of_sync_slot(kept_wal.slot, subscription.oid, sync_id) is not None
        ]

    async def _give_up(self, subscription: Subscription, largest: KeptWal) -> None:
        """Mark the subscription, and drop its slots."""
        async with (
            CatalogConnection.open(self._context.target, APPLICATION_NAME) as catalog,
            catalog.use() as connection,
            publisher_connection.connect_to_publisher(
                connection, subscription.name, subscription.conninfo, password=subscription.must_use_password
            ) as publisher,
        ):
            system_id = str((await publisher.identify_system()).systemid)
            if system_id != subscription.system_id:
                self._warn(subscription, "the server at the publisher's address is not known to be its publisher")
                return
            await self._mark(connection, subscription, largest)
            reach(Point.GAVE_UP)
            with anyio.move_on_after(DROP_TIMEOUT):
                while not await self._drop(connection, publisher, subscription):
                    await anyio.sleep(POLL)
                return
        self._warn(subscription, "a walsender still uses the slot")

    async def _mark(self, connection: Connection, subscription: Subscription, largest: KeptWal) -> None:
        reason = (
            f'replication slot "{largest.slot}" kept {formatting.in_bytes(largest.bytes)} of WAL on the publisher, more'
            f" than the wal_budget {subscription.wal_budget}"
        )
        async with connection.transaction():
            if not await give_up(connection, subscription.oid, reason, subscription.wal_budget):
                return
            if await progress_records.load_confirmed(connection, subscription.oid) is None:
                # A worker that is started by hand compares it with a slot that was created by hand.
                await progress_records.save_confirmed(connection, subscription.oid, Lsn(1))
        error = SlotLost(reason)
        add_hint(error, subscription.name)
        telemetry.log(
            telemetry.ERROR,
            f'subscription "{subscription.name}" has been given up',
            detail=f"{reason[0].upper()}{reason[1:]}.",
            hint=error.hint,
            event="subscription.gave_up",
            subscription=subscription.name,
        )
        await self._context.on_error(subscription.name, error)

    async def _drop(self, connection: Connection, publisher: Publisher, subscription: Subscription) -> bool:
        """Drop the slots if none is in use. Returns False if one is.

        They stay if the subscription is no longer given up, or if they keep less WAL than the budget.
        """
        async with connection.transaction():
            if not await lock_given_up(connection, subscription.oid, subscription.wal_budget):
                return True
            slots = await self._kept(publisher.session, subscription)
            largest = _largest(slots)
            if largest is None or largest.bytes <= (subscription.wal_budget_bytes or 0):
                return True
            if any(slot.is_active for slot in slots):
                return False
            for slot in slots:
                await publisher.session.rows(_DROP.format(slot=literal(slot.slot)))
                telemetry.log(telemetry.LOG, f'dropped replication slot "{slot.slot}" on publisher', slot=slot.slot)
        self._exceeded[subscription.oid] = 0
        return True

    def _warn(self, subscription: Subscription, reason: str) -> None:
        """Log once why the budget of a subscription cannot be kept."""
        if self._said.get(subscription.oid) == reason:
            return
        self._said[subscription.oid] = reason
        telemetry.log(
            telemetry.WARNING,
            f'wal_budget of subscription "{subscription.name}" cannot be enforced now',
            detail=f"{reason[0].upper()}{reason[1:]}.",
            event="subscription.budget_not_enforced",
            subscription=subscription.name,
        )


def _largest(slots: list[KeptWal]) -> KeptWal | None:
    return max(slots, key=lambda one: one.bytes, default=None)
