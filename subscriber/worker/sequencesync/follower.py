"""Keeps sequences of the target ahead of the publisher's, for `sequences = follow`.

pgoutput has no message for sequences, so the values are polled. A poll moves a sequence of the target only in the
direction of its increment, by a margin: at least `sequence_margin` calls of nextval(), and twice the calls since the
poll before. A sequence that was set back on the publisher (setval(), RESTART) stays where it is on the target, and the
log and the status report it.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.subscription_sequence import (
    SetOutcome,
    SubscriptionSequence,
    load_last_values,
    set_problem,
    set_ready,
    set_value,
)
from subscriber.publisher.connection import Publisher
from subscriber.publisher.sequences import SequenceValue
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.settings import Settings
from subscriber.subscription import Subscription
from subscriber.worker.sequencesync.synchronization import PROBLEMS, Name, SequenceProblem, ahead_of, describe


class SequenceFollower:
    """Moves sequences of the target, and remembers the values that the last poll found."""

    def __init__(self, subscription: Subscription, catalog: CatalogConnection, settings: Settings) -> None:
        self._subscription = subscription
        self._catalog = catalog
        self._margin = settings.sequence_margin
        self._seen: dict[Name, SequenceValue] = {}

    async def poll(self, publisher: Publisher, sequences: Sequence[SubscriptionSequence]) -> None:
        """Read the values of `sequences`, and move those of the target that are not far enough ahead.

        Raises:
            ConnectionLost: A server did not answer.
            ServerError: A server refused a statement.

        Cancellation: safe; the next poll moves the sequences.
        """
        known = {(sequence.schema, sequence.name): sequence for sequence in sequences}
        values = await publisher.sequence_values(list(known))
        # TRUNCATE … RESTART IDENTITY sets a sequence of the target back, and a user may do the same.
        async with self._catalog.use() as connection:
            local = await load_last_values(connection, list(known))
        for name, sequence in known.items():
            value = values.get(name)
            if value is None:
                problem = SequenceProblem.MISSING if name not in values else SequenceProblem.DENIED_THERE
                await self._fail(sequence, describe(problem, [name]))
            elif (target := self._next(name, value, local.get(name))) is not None:
                await self._move(sequence, target)
            if value is not None:
                await self._check_direction(sequence, value)
                self._seen[name] = value

    def _next(self, name: Name, value: SequenceValue, local: int | None) -> SequenceValue | None:
        """Return the value to which the target's sequence moves. None: it is far enough ahead.

        `local` is the target's last value; None: nextval() has not been called, or the sequence is missing.
        """
        before = self._seen.get(name)
        calls = 0 if before is None else _calls(before, value)
        target = ahead_of(value, max(self._margin, 2 * calls))
        if local is None:
            return target
        left = (local - value.last_value) // value.definition.increment
        return target if left < max(self._margin // 2, calls) else None

    async def _move(self, sequence: SubscriptionSequence, target: SequenceValue) -> None:
        name = sequence.schema, sequence.name
        async with self._catalog.use() as connection, connection.transaction():
            outcome = await set_value(connection, self._subscription.oid, name, target, ahead=True)
            if outcome in (SetOutcome.SET, SetOutcome.AHEAD) and sequence.problem is not None:
                await set_ready(connection, self._subscription.oid, name, target.lsn)
        if outcome in PROBLEMS:
            await self._fail(sequence, describe(PROBLEMS[outcome], [name]))

    async def _check_direction(self, sequence: SubscriptionSequence, value: SequenceValue) -> None:
        """Report a sequence that was set back on the publisher. One that cycles begins again by itself."""
        before = self._seen.get((sequence.schema, sequence.name))
        if before is None or value.definition.cycles or _calls(before, value) >= 0:
            return
        problem = (
            f'sequence "{sequence.schema}.{sequence.name}" was set back on the publisher,'
            f" from {before.last_value} to {value.last_value}"
        )
        subscription = identifier(self._subscription.name)
        hint = Remedy("set it back on the target, too", f"ALTER SUBSCRIPTION {subscription} REFRESH SEQUENCES;")
        await self._fail(sequence, problem, hint)

    async def _fail(self, sequence: SubscriptionSequence, problem: str, hint: Remedy | None = None) -> None:
        if sequence.problem == problem:
            return
        telemetry.log(telemetry.WARNING, problem, hint=hint, event="sequence.failed")
        async with self._catalog.use() as connection:
            await set_problem(connection, self._subscription.oid, (sequence.schema, sequence.name), problem)


def _calls(before: SequenceValue, now: SequenceValue) -> int:
    """Return the number of calls of nextval() between two values; negative if the sequence was set back."""
    return (now.last_value - before.last_value) // now.definition.increment
