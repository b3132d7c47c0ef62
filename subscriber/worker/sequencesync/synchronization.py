"""Sequence synchronization: set sequences of the target to the publisher's values.

Purpose: after CREATE SUBSCRIPTION, REFRESH PUBLICATION or REFRESH SEQUENCES, each sequence in state INIT is set once
and becomes READY. Up to BATCH_SIZE sequences are read in one query and set in one transaction.

Invariants:

- No lock of the target is held while the publisher answers. Two servers that replicate both ways would otherwise wait
  for each other, in a circle that neither of them sees.
- A sequence is set with the rights of its owner, or with run_as_owner of the subscription's owner.
- A sequence is only set if both sides define it the same way: type, start, increment, limits, cycle.

Failure cases:

- Worker killed, or a server lost, before a batch is committed: setval() is not undone, the state is still INIT, and
  the next worker sets the publisher's value of that time.
- Sequence missing, renamed, defined differently, or without the privilege on either side: the others are set. The row
  of the sequence stores the reason, the log has a WARNING, and the worker retries after retry_interval.

Source: src/backend/replication/logical/sequencesync.c.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.subscription_sequence import SetOutcome, set_problem, set_ready, set_value
from subscriber.display import shell_word
from subscriber.errors import SequenceSyncError
from subscriber.publisher.connection import Publisher
from subscriber.publisher.sequences import BATCH_SIZE, SequenceValue
from subscriber.remedy import Remedy
from subscriber.subscription import Subscription

Name = tuple[str, str]  # schema, name


@dataclass(frozen=True, slots=True)
class _Words:
    """PostgreSQL's words for a problem, in the singular and the plural."""

    one: str
    several: str
    hint: str | None = None


class SequenceProblem(Enum):
    """The reason why a sequence cannot be set, in the order in which PostgreSQL reports the reasons."""

    MISMATCHED = _Words(
        "mismatched or renamed sequence on subscriber ({})", "mismatched or renamed sequences on subscriber ({})"
    )
    DENIED_HERE = _Words(
        "insufficient privileges on subscriber sequence ({})", "insufficient privileges on subscriber sequences ({})"
    )
    DENIED_THERE = _Words(
        "insufficient privileges on publisher sequence ({})",
        "insufficient privileges on publisher sequences ({})",
        "Grant SELECT on the sequence to the role used for the replication connection on the publisher.",
    )
    MISSING = _Words("missing sequence on publisher ({})", "missing sequences on publisher ({})")


PROBLEMS = {
    SetOutcome.MISMATCHED: SequenceProblem.MISMATCHED,
    SetOutcome.DROPPED: SequenceProblem.MISMATCHED,
    SetOutcome.DENIED: SequenceProblem.DENIED_HERE,
}


async def synchronize(
    subscription: Subscription, names: Sequence[Name], catalog: CatalogConnection, publisher: Publisher
) -> None:
    """Set sequences of the target to the publisher's values, and make them READY.

    Args:
        subscription: The subscription that they belong to.
        names: Schema and name of each sequence.
        catalog: A connection to the target.
        publisher: A connection to the publisher that nothing else uses.

    Raises:
        SequenceSyncError: Some sequences could not be set. The others have been.
        ConnectionLost: A server did not answer.
        ServerError: A server refused a statement.

    Cancellation: sequences of the present batch may be set and not be READY.
    """
    failed: defaultdict[SequenceProblem, list[Name]] = defaultdict(list)
    for at in range(0, len(names), BATCH_SIZE):
        batch = names[at : at + BATCH_SIZE]
        values = await publisher.sequence_values(batch)
        async with catalog.use() as connection, connection.transaction():
            for name in batch:
                value = values.get(name)
                problem = SequenceProblem.MISSING if name not in values else SequenceProblem.DENIED_THERE
                if value is not None:
                    outcome = await set_value(connection, subscription.oid, name, value, ahead=False)
                    if outcome is SetOutcome.SET:
                        await set_ready(connection, subscription.oid, name, value.lsn)
                        continue
                    problem = PROBLEMS[outcome]
                failed[problem].append(name)
                await set_problem(connection, subscription.oid, name, describe(problem, [name]))
    if failed:
        _report(subscription, failed)
        raise SequenceSyncError(
            f'logical replication sequence synchronization failed for subscription "{subscription.name}"',
            detail="; ".join(describe(problem, failed[problem]) for problem in SequenceProblem if problem in failed),
            hint=Remedy("find the statement for each sequence", f"subscriber check {shell_word(subscription.name)}"),
        )


def describe(problem: SequenceProblem, names: Sequence[Name]) -> str:
    """Return PostgreSQL's message about sequences that have the same problem."""
    words = problem.value
    listed = ", ".join(f'"{schema}.{name}"' for schema, name in names)
    return (words.one if len(names) == 1 else words.several).format(listed)


def _report(subscription: Subscription, failed: dict[SequenceProblem, list[Name]]) -> None:
    for problem in SequenceProblem:
        if names := failed.get(problem):
            hint = problem.value.hint
            if problem is SequenceProblem.DENIED_HERE and subscription.run_as_owner:
                hint = "Grant UPDATE on the sequence to the subscription owner on the subscriber."
            if hint is not None and len(names) > 1:
                hint = hint.replace("the sequence ", "the sequences ")
            telemetry.log(telemetry.WARNING, describe(problem, names), hint=hint, event="sequence.failed")


def ahead_of(value: SequenceValue, margin: int) -> SequenceValue:
    """Return a value that is `margin` calls of nextval() further, within the limits of the sequence."""
    definition = value.definition
    moved = value.last_value + margin * definition.increment
    limited = min(max(moved, definition.least), definition.greatest)
    return SequenceValue(limited, True, value.lsn, definition)
