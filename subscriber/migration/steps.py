"""The effects of the steps of a move, one method for each step of plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from time import monotonic
from typing import Any

import anyio

from subscriber import server_features as features
from subscriber.apply.table_states import TableState
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.display import shell_word, sql_identifier, sql_literal
from subscriber.errors import StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.migration import fence, gates, sequences, subscriptions
from subscriber.migration.hooks import HookCall, HookEvent, MoveHook, address, run_hooks
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.migration.schema.large_objects import copy_large_objects, count_large_objects
from subscriber.migration.server import MoveServer
from subscriber.migration.sessions import prepared_transactions
from subscriber.quoting import identifier, literal
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

HAND_OVERS = 100  # attempts to have copied tables handed over on an idle server
POLL = 0.2  # seconds between two markers that measure the lag


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """Options of `cutover` and `back`.

    Attributes:
        max_pause: seconds for which applications may be unable to write. After that, the serving server opens again.
        max_lag: seconds in which a marker must be confirmed before the pause.
        lag_window: seconds for which the lag must stay below that.
        max_transaction_age: seconds; older transactions are waited for before the pause. Younger ones are ended.
        sequence_margin: increments by which sequences are advanced further.
        verify: compare all tables during the pause.
        verified_within: seconds within which verify() must have found no difference before the pause. None: not.
        waive: names of conditions that need not hold, see gates.WAIVABLE; of all objects, or as KIND:OBJECT of one.
        large_objects: copy the large objects that differ during the pause. Otherwise they stay behind.
        back_conninfo: the connection string by which the source reaches the target. None: the one of the command.
        hooks: programs that stop applications, and lead them to the other server.
    """

    max_pause: float = 5.0
    max_lag: float = 1.0
    lag_window: float = 30.0
    max_transaction_age: float = 5.0
    sequence_margin: int = 0
    verify: bool = False
    verified_within: float | None = None
    waive: tuple[str, ...] = ()
    large_objects: bool = False
    back_conninfo: str | None = field(default=None, repr=False)
    hooks: tuple[MoveHook, ...] = ()


Detail = dict[str, Any]  # what a step reports: JSON values


class Steps:
    """The steps of one move, between two connected servers."""

    def __init__(
        self,
        names: Mapping[Side, str],
        servers: Mapping[Side, MoveServer],
        serving: Side,
        options: MoveOptions,
        command: str,
    ) -> None:
        """Create the steps of a move.

        Args:
            names: the subscription of each server.
            servers: both servers.
            serving: the one that applications write to.
            options: limits and hooks.
            command: cutover, back, abort or finish.
        """
        self.serving, self.following = servers[serving], servers[serving.other]
        self.options = options
        self._names = names
        self.command = command
        self._closed_at: datetime | None = None
        self._slot: str | None = None  # that the following server reads, since gates()
        self.position = Lsn(0)  # of the marker that drain() has committed
        self.waits_for = ""  # the condition that gates() has waited for last

    @property
    def before(self) -> Standing:
        """The state of the move while applications write to the serving server."""
        return Standing(self.serving.side, Phase.FOLLOWING)

    @property
    def after(self) -> Standing:
        """The state of the move when the servers have exchanged their roles."""
        return Standing(self.following.side, Phase.FOLLOWING)

    @property
    def filters(self) -> bool:
        """True if the following server does not send back the changes that it has received."""
        return features.ORIGIN_FILTER.is_in(self.following.version) and self.following.has_origins

    async def live(self) -> Subscription:
        """Return the subscription of the following server."""
        return await self.following.subscription(self._names[self.following.side])

    async def way_back(self) -> Subscription | None:
        """Return the subscription of the serving server, or None if it does not exist yet."""
        try:
            return await self.serving.subscription(self._names[self.serving.side])
        except StatementError:
            return None

    async def slot(self) -> str:
        """Return the slot that the following server reads.

        Raises:
            StatementError: its subscription has none.
        """
        live = await self.live()
        if live.slot_name is None:
            raise StatementError(
                f'subscription "{live.name}" of the {self.following.side} has no slot',
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return live.slot_name

    # --- before the pause -------------------------------------------------------------------------------

    async def guard(self) -> Detail:
        live = await self.live()
        # A former command was killed, or lost this server, after it had disabled the subscription.
        await self.resume_following()
        async with self.following.use() as connection:
            relids = [relation.relid for relation in await load_relation_states(connection, live.oid)]
        await self.following.create_fence(relids)
        ended = await self.following.wait_until_quiet(await self.following.close_fence(self.before))
        if await self.serving.load() is None:
            await self.serving.save(self.before)
        return {"sessions": ended}

    async def arm(self) -> Detail:
        way_back = await self.way_back()
        publications = [self._names[self.serving.side]] if way_back is None else way_back.publications
        await subscriptions.check_published(self.following, self._names[self.following.side], publications)
        if not self.filters:
            # Its changes would return from here, so the subscription is started during the pause.
            await self.release_way_back()
            return {"deferred": f"the {self.following.side} does not filter changes by origin"}
        await self._start_way_back()
        return {"lsn": str(await self._prove_way_back())}

    async def prepare(self) -> Detail:
        live = await self.live()
        async with self.serving.use() as connection:
            relids = [row["relid"] for row in await connection.fetch(fence.PUBLISHED, list(live.publications))]
        await self.serving.create_fence(relids)
        return {}

    async def gates(self) -> Detail:
        await self._hand_tables_over()
        options = self.options
        waived = await gates.check(
            self.serving,
            self.following,
            await self.live(),
            options.waive,
            options.verified_within,
            is_compared=options.verify,
        )
        self._slot = await self.slot()
        detail: Detail = {"waived": waived, "differences": await self._differences()}
        detail |= await gates.not_replicated(self.serving)
        return detail | await self._wait_for_lag(self._slot, waived)

    async def _differences(self) -> list[str]:
        """Return the objects whose definitions differ. They may be meant to, so they do not stop a move."""
        try:
            return await gates.differences(self.serving.dsn, self.following.dsn)
        except SubscriberError as error:
            return [f"not compared: {error.message}"]

    async def _wait_for_lag(self, slot: str, waived: list[str]) -> Detail:
        """Wait until the lag and the age of transactions stay below their limits, and add exceeded ones to `waived`."""
        options = self.options
        since, worst, lag = monotonic(), 0.0, 0.0
        while monotonic() - since < options.lag_window or worst == 0.0:
            began = monotonic()
            await self.serving.wait_until_confirmed(slot, await self.serving.mark())
            lag = monotonic() - began
            old = await gates.long_transactions(self.serving, options.max_transaction_age)
            exceeded = {"lag": lag > options.max_lag, "long_transaction": bool(old)}
            waived += [
                condition
                for condition in exceeded
                if exceeded[condition] and condition in options.waive and condition not in waived
            ]
            if any(exceeded[condition] and condition not in options.waive for condition in exceeded):
                since, worst = monotonic(), 0.0
                self.waits_for = (
                    f"transactions of {', '.join(old)}"
                    if old and "long_transaction" not in options.waive
                    else f"a lag below {options.max_lag:g} s, not {lag:.1f} s"
                )
            else:
                worst = max(worst, lag)
            await anyio.sleep(min(POLL, options.lag_window))
        return {"lag": round(worst, 3)}

    async def _hand_tables_over(self) -> None:
        """Commit markers until no table waits for a later position to become ready."""
        live = await self.live()
        for _ in range(HAND_OVERS):
            async with self.following.use() as connection:
                relations = await load_relation_states(connection, live.oid, not_ready=True)
            if not relations or {relation.state for relation in relations} != {TableState.SYNCDONE}:
                return
            await self.serving.mark()
            await anyio.sleep(POLL)

    # --- the pause ----------------------------------------------------------------------------------------

    async def hold(self) -> Detail:
        if not self.options.hooks:
            return {}
        await self.serving.save(await self._present(), lambda facts: replace(facts, held=True))
        return {"hooks": await self._call_hooks(HookEvent.PAUSE, self.serving)}

    async def freeze(self) -> Detail:
        self._closed_at = await self.serving.close_fence(Standing(self.serving.side, Phase.FROZEN))
        return {}

    async def quiet(self) -> Detail:
        return {"sessions": await self._quiet()}

    async def _quiet(self) -> int:
        assert self._closed_at is not None
        ended = await self.serving.wait_until_quiet(self._closed_at)
        async with self.serving.use() as connection:
            prepared = await prepared_transactions(connection)
            if gids := [
                gid for gid in prepared if not gates.is_waived("prepared_transaction", gid, self.options.waive)
            ]:
                raise StatementError(
                    f"transactions are prepared on the {self.serving.side}: {', '.join(map(literal, gids))}",
                    hint=" ".join(f"COMMIT PREPARED {sql_literal(gid)};" for gid in gids) + " Or ROLLBACK PREPARED.",
                    sqlstate=OBJECT_IN_USE,
                )
        return ended

    async def drain(self) -> Detail:
        self.position = await self.serving.mark()
        await self.serving.wait_until_confirmed(self._slot or await self.slot(), self.position)
        await gates.check_again(self.serving, self.following, await self.live(), self.options.waive)
        detail: Detail = {"lsn": str(self.position)}
        if self.options.verify:
            detail |= await self._verify()
        return detail

    async def _verify(self) -> Detail:
        return await self.compare()

    async def compare(self) -> Detail:
        """Compare all rows of both servers, at one position.

        Raises:
            SubscriberError: tables differ.
        """
        # Its 50 modules are a sixth of a command's start, and few commands compare rows.
        from subscriber.comparison.comparison import verify

        comparison = await verify(self.following.dsn, (await self.live()).name)
        different = [table.name for table in comparison.tables if not table.is_same]
        if different:
            raise SubscriberError(
                f"tables differ between both servers: {', '.join(different)}",
                hint=f"subscriber verify {shell_word((await self.live()).name)} names the rows.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return {"tables": {table.name: table.rows for table in comparison.tables}}

    async def sequences(self) -> Detail:
        # A session that was about to start when the others were ended could have drawn a value.
        await self._quiet()
        states: dict[Side, tuple[list[sequences.SequenceState], dict[str, tuple[int, bool]]]] = {}

        async def read(server: MoveServer) -> None:
            async with server.use() as connection:
                known = await sequences.list_sequences(connection)
                states[server.side] = known, await sequences.read_values(connection, known)

        async with anyio.create_task_group() as tasks:
            for server in (self.serving, self.following):
                tasks.start_soon(read, server)
        (known, values), (there, own) = states[self.serving.side], states[self.following.side]
        if problems := sequences.obstacles(known, there):
            raise StatementError(
                "sequences cannot be advanced",
                detail="\n".join(problems),
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        wanted = sequences.advances(known, values, own, self.options.sequence_margin)

        async def advance() -> None:
            async with self.following.use() as connection:
                await sequences.set_values(connection, wanted)

        await self.following.perform([sequences.set_statement(*advance_of) for advance_of in wanted], advance)
        return {"sequences": len(known), "advanced": len(wanted)}

    async def objects(self) -> Detail:
        async with self.serving.use() as there, self.following.use() as here:
            if not self.options.large_objects:
                return {"large objects left behind": await count_large_objects(there) or None}
            copied = await copy_large_objects(there, here)
        return {"large objects": copied.total, "copied": copied.copied}

    async def stop(self) -> Detail:
        live = await self.live()
        async with self.following.use() as connection:
            applied = await progress_records.load(connection, live.oid)
        if live.enabled:
            await self._disable(self.following, live, self.position, self.before)
        return {"lsn": str(self.position), "applied": None if applied is None else str(applied)}

    async def turn(self) -> Detail:
        if not self.filters:  # otherwise it was started by arm()
            await self._start_way_back()
        return {}

    async def switch(self) -> Detail:
        await self._quiet()
        await self.serving.save(Standing(self.serving.side, Phase.SWITCHING))
        return {"lsn": str(self.position)}

    async def open(self) -> Detail:
        has_hooks = bool(self.options.hooks)
        await self.following.open_fence(self.after, lambda facts: replace(facts, redirect=facts.redirect or has_hooks))
        return {}

    # --- after the pause ------------------------------------------------------------------------------------

    async def redirect(self) -> Detail:
        if not self.options.hooks:
            return {}
        number = await self._call_hooks(HookEvent.SWITCH, self.following)
        number += await self._call_hooks(HookEvent.RESUME, self.following)
        await self.following.save(self.after, lambda facts: replace(facts, redirect=False))
        return {"hooks": number}

    async def settle(self) -> Detail:
        await self._give_up_slot(self.following, await self.live(), self.serving)
        # The last change, because the difference of the two rows has a killed step repeated.
        await self.serving.save(self.after, lambda facts: replace(facts, held=False))
        return {}

    async def probe(self) -> Detail:
        return {"lsn": str(await self._prove_way_back())}

    # --- the undo ---------------------------------------------------------------------------------------------

    async def release_way_back(self) -> None:
        """Stop the subscription of the serving server, and drop its slot."""
        way_back = await self.way_back()
        if way_back is None:
            return
        if way_back.enabled:
            await self._disable(self.serving, way_back, Lsn(0), await self._present())
        await self._give_up_slot(self.serving, way_back, self.following)

    async def resume_following(self) -> None:
        """Enable the subscription of the following server again, after the serving one was opened."""
        known = await self.following.load()
        if known is not None and known.facts.stopped is not None:
            if not self.filters:
                await self.release_way_back()
            live = await self.live()
            await self.following.perform(
                subscriptions.alter_statement(live, "ENABLE"),
                lambda: subscriptions.enable(self.following, live, self.before),
            )

    async def release_applications(self) -> None:
        """Call the hooks to resume, after the serving server was opened again."""
        known = await self.serving.load()
        if known is not None and known.facts.held:
            await self._call_hooks(HookEvent.RESUME, self.serving)
            if self.options.hooks:
                await self.serving.save(known.standing, lambda facts: replace(facts, held=False))

    async def _present(self) -> Standing:
        """Return where the move stands, which is paused if it continues after a kill."""
        known = await self.serving.load()
        return self.before if known is None else known.standing

    async def _call_hooks(self, event: HookEvent, server: MoveServer) -> int:
        host, port, database = address(server.dsn)
        call = HookCall(event, self.serving.migration, self.command, server.side, host, port, database)
        return await run_hooks(self.options.hooks, call)

    async def _disable(self, server: MoveServer, subscription: Subscription, at: Lsn, standing: Standing) -> None:
        await server.perform(
            subscriptions.alter_statement(subscription, "DISABLE"),
            lambda: subscriptions.disable(server, subscription, at, standing),
        )

    async def _give_up_slot(self, server: MoveServer, subscription: Subscription, publisher: MoveServer) -> None:
        if subscription.slot_name is not None:
            publisher.note(subscriptions.drop_slot_statement(subscription.slot_name))
            await server.perform(
                subscriptions.alter_statement(subscription, "SET (slot_name = NONE)"),
                lambda: subscriptions.give_up_slot(server, subscription, publisher),
            )

    async def _start_way_back(self) -> None:
        """Have the serving server replicate the following one."""
        name, way_back = self._names[self.serving.side], await self.way_back()
        if way_back is None:
            statement = await subscriptions.publication_statement(
                self.following, self._names[self.following.side], name
            )
            if statement is not None:
                await self.following.create_publication(name, statement, self.before)
            conninfo = self.options.back_conninfo or self.following.dsn
            trusted = (await self.live()).trusted_owners  # the same functions run on the way back
            await self.serving.perform(
                subscriptions.create_statement(name, self.following, "'…'", trusted),
                lambda: subscriptions.create(self.serving, name, self.following, conninfo, trusted),
            )
            return
        known = await self.serving.load()
        stopped = None if known is None else known.facts.stopped
        if way_back.enabled and stopped is None:
            await self._refresh_way_back(way_back)
            return
        if known is None or stopped is None:
            raise StatementError(
                f'subscription "{way_back.name}" of the {self.serving.side} is disabled',
                hint=f"Enable or drop it: ALTER SUBSCRIPTION {sql_identifier(way_back.name)} ENABLE;",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        standing, slot = known.standing, stopped.slot
        self.following.note(f"CREATE_REPLICATION_SLOT {identifier(slot)} LOGICAL pgoutput")
        await self.serving.perform(
            [
                subscriptions.alter_statement(way_back, f"SET (slot_name = {identifier(slot)})"),
                subscriptions.alter_statement(way_back, "ENABLE"),
            ],
            lambda: subscriptions.start(self.serving, way_back, self.following, slot, standing),
        )
        await self._refresh_way_back(way_back)

    async def _refresh_way_back(self, found: Subscription) -> None:
        """Add tables that the move has got since the way back was created. Both servers have their rows."""
        if await subscriptions.leaves(self.following, await self.live()) - await subscriptions.leaves(
            self.serving, found
        ):
            statement = subscriptions.alter_statement(found, "REFRESH PUBLICATION WITH (copy_data = false)")
            await self.serving.perform(statement, lambda: subscriptions.refresh(self.serving, statement))

    async def _prove_way_back(self) -> Lsn:
        """Wait until a marker of the following server, or of the new serving one, has gone the way back."""
        way_back = await self.way_back()
        assert way_back is not None
        position = await self.following.mark()
        await self.following.wait_until_confirmed(way_back.slot_name or way_back.name, position)
        return position
