"""TimelineHistory: the timeline of a server and its ancestors, as PostgreSQL's history files have them.

Invariants.

- Changes before the position at which two histories part are the same on both. Changes after it are not.
- The number of a timeline does not identify it. Two standbys of one primary can both choose the same number, and their
  histories show it.

Source: readTimeLineHistory() in timeline.c.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.lsn import Lsn


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """A timeline and its ancestors.

    Attributes:
        timeline: the number of the timeline.
        ends: number and end of each ancestor, oldest first.
    """

    timeline: int
    ends: tuple[tuple[int, Lsn], ...] = ()

    @classmethod
    def parse(cls, timeline: int, text: str) -> TimelineHistory:
        """Parse the text of `str()`."""
        pairs = (part.split(":") for part in text.split())
        return cls(timeline, tuple((int(number), Lsn.parse(end)) for number, end in pairs))

    def __str__(self) -> str:
        return " ".join(f"{number}:{end}" for number, end in self.ends)

    def until(self, timeline: int) -> TimelineHistory | None:
        """Return the history of an ancestor. None: it is none of this timeline."""
        if timeline == self.timeline:
            return self
        if timeline not in dict(self.ends):
            return None
        return TimelineHistory(timeline, tuple(end for end in self.ends if end[0] < timeline))

    def fork(self, other: TimelineHistory) -> Lsn | None:
        """Return the position at which the two histories part. None: they are the same."""
        shared = Lsn(0)
        for (mine, its_end), (two, other_end) in zip(self._periods, other._periods, strict=False):
            if mine != two:
                return shared
            if its_end != other_end:
                return min(end for end in (its_end, other_end) if end is not None)
            shared = its_end or shared
        return None

    @property
    def _periods(self) -> tuple[tuple[int, Lsn | None], ...]:
        return (*self.ends, (self.timeline, None))
