"""The position that may be confirmed, compared with a simple model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from subscriber.change_stream.engine.acknowledgements import AcknowledgementTracker
from subscriber.lsn import Lsn

# "hand out": one more transaction, which ends further on; "pass": a position without one; a number: ack that one.
steps = st.lists(st.sampled_from(["hand out", "pass"]) | st.integers(1, 12), max_size=40)


@given(steps=steps)
def test_a_position_is_confirmed_when_all_before_it_is_acknowledged(steps: list[str | int]) -> None:
    acks = AcknowledgementTracker()
    ends: list[int] = []  # of transactions, by number
    acked: set[int] = set()
    position = 0
    for step in steps:
        position += 10
        if step == "hand out":
            assert acks.handed_out() == len(ends) + 1
            ends.append(position)
            acks.note(Lsn(position))
        elif step == "pass":
            acks.note(Lsn(position))
        elif isinstance(step, int) and step <= len(ends):
            position -= 10
            before = acks.flush
            assert acks.ack(step) == (acks.flush > before)
            acked.add(step)
        else:
            position -= 10
        missing = [end for number, end in enumerate(ends, 1) if number not in acked]
        # Positions behind the lowest transaction that is missing may not be confirmed, all before it are.
        noted = [end for end in (*ends, acks.passed) if not missing or end < missing[0]]
        assert acks.passed == position
        assert acks.flush <= acks.passed
        if missing:
            assert max(noted, default=0) <= acks.flush < missing[0]
        else:
            assert acks.flush == position
        assert acks.open == len(missing)


def test_a_position_that_was_noted_never_goes_back() -> None:
    acks = AcknowledgementTracker(Lsn(100))
    acks.note(Lsn(50))
    assert (acks.passed, acks.flush) == (100, 100)
