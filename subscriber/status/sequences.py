"""The sequences of a subscription, as the status shows them. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.apply.table_states import TableState
from subscriber.catalog.store.subscription_sequence import SubscriptionSequence


@dataclass(frozen=True, slots=True)
class SequencesStatus:
    """The number of sequences in each state, and the problems of those that were not set."""

    ready: int = 0
    waiting: int = 0
    problems: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The number of all sequences."""
        return self.ready + self.waiting


def find(sequences: Sequence[SubscriptionSequence]) -> SequencesStatus:
    """Count the sequences of one subscription."""
    ready = sum(sequence.state == TableState.READY for sequence in sequences)
    problems = tuple(sequence.problem for sequence in sequences if sequence.problem is not None)
    return SequencesStatus(ready, len(sequences) - ready, problems)


def describe(status: SequencesStatus) -> list[tuple[str, str]]:
    """Return (label, text) of the lines about sequences; none if the subscription has no sequence."""
    if not status.total:
        return []
    counts = [(status.ready, "ready"), (status.waiting, "waiting")]
    return [("sequences", ", ".join(f"{number} {state}" for number, state in counts if number))]


def as_json(status: SequencesStatus) -> dict[str, Any]:
    """Return the keys of the status about sequences."""
    return {
        "sequences": {"ready": status.ready, "waiting": status.waiting},
        "sequence_problems": list(status.problems),
    }
