"""TransactionTimer: the stages of each kind of transaction, from payloads and positions."""

from __future__ import annotations

import itertools

import pytest

from subscriber.apply.progress import Positions
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData
from subscriber.protocol.copy_data import encode as envelope
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
)
from subscriber.transaction_times import TransactionTimes
from subscriber.worker.transaction_timer import MAX_OPEN, TransactionTimer


def payloads(*messages: Message) -> list[bytes]:
    return [envelope(XLogData(Lsn(1), Lsn(1), 0, encode(message))) for message in messages]


def change(xid: int | None = None) -> Truncate:
    return Truncate(xid, False, False, (1,))


def at(position: int, *, apply: int | None = None) -> Positions:
    return Positions(Lsn(position), Lsn(position), Lsn(position if apply is None else apply))


def ordinary(xid: int, end: int) -> list[bytes]:
    return payloads(Begin(Lsn(end - 1), 5, xid), change(), change(), Commit(Lsn(end - 1), Lsn(end), 5))


class Scene:
    """A timer whose clock advances by 1 at each reading."""

    def __init__(self, limit: int = MAX_OPEN) -> None:
        self.ended: list[TransactionTimes] = []
        numbers = itertools.count(1)
        self.timer = TransactionTimer(self.ended.append, clock=lambda: next(numbers), limit=limit)

    def confirm(self, position: int) -> list[tuple[str, int, int]]:
        self.timer.advance(at(position))
        self.timer.confirm(at(position))
        confirmed = [(times.kind, times.xid, times.changes) for times in self.ended]
        self.ended.clear()
        return confirmed


def test_the_stages_of_a_transaction_whose_messages_arrive_separately() -> None:
    scene = Scene()
    for payload in ordinary(7, 100):
        scene.timer.receive([payload])
    scene.timer.advance(at(50, apply=100))
    scene.timer.confirm(at(50, apply=100))
    scene.timer.advance(at(100))
    assert scene.ended == []
    scene.timer.confirm(at(100))
    (times,) = scene.ended
    assert (times.began, times.received, times.applied, times.flushed, times.confirmed) == (1, 4, 5, 6, 7)
    assert (times.xid, times.changes, times.finish_lsn, times.end_lsn, times.committed) == (7, 2, 99, 100, 5)
    assert times.bytes > 4 * 25


def test_transactions_of_one_arrival_end_at_their_own_positions() -> None:
    scene = Scene()
    scene.timer.receive([*ordinary(1, 100), envelope(Keepalive(Lsn(100), 0, False)), *ordinary(2, 200)])
    assert scene.confirm(100) == [("COMMIT", 1, 2)]
    assert scene.confirm(199) == []
    assert scene.confirm(200) == [("COMMIT", 2, 2)]


def test_stages_of_prepared_and_streamed_transactions_are_measured() -> None:
    scene = Scene()
    scene.timer.receive(
        payloads(
            StreamStart(5, True),
            change(5),
            StreamStop(),
            BeginPrepare(Lsn(9), Lsn(10), 0, 3, "g"),
            change(),
            Prepare(Lsn(9), Lsn(10), 0, 3, "g"),
            StreamStart(6, True),
            change(6),
            StreamStop(),
            StreamStart(5, False),
            change(5),
            change(5),
            StreamStop(),
            StreamAbort(6, 6, None, None),
            CommitPrepared(Lsn(19), Lsn(20), 0, 3, "g"),
            StreamCommit(5, Lsn(29), Lsn(30), 0),
            StreamStart(8, True),
            StreamStop(),
            StreamPrepare(Lsn(39), Lsn(40), 0, 8, "h"),
            RollbackPrepared(Lsn(40), Lsn(50), 0, 0, 8, "h"),
        )
    )
    assert scene.confirm(100) == [
        ("PREPARE", 3, 1),
        ("COMMIT PREPARED", 3, 0),
        ("STREAM COMMIT", 5, 3),
        ("STREAM PREPARE", 8, 0),
        ("ROLLBACK PREPARED", 8, 0),
    ]


@pytest.mark.parametrize("received", [2, 4])
def test_only_the_transaction_of_an_error_is_reported(received: int) -> None:
    scene, error = Scene(), SubscriberError("wrong")
    scene.timer.receive([*ordinary(1, 100), *ordinary(2, 200)[:received]])
    scene.timer.fail(error)
    assert scene.ended == []
    error.xid = 2
    scene.timer.fail(error)
    scene.timer.close()
    (times,) = scene.ended
    assert (times.xid, times.error, times.applied) == (2, error, None)
    assert times.failed is not None


def test_the_end_reports_what_is_durable() -> None:
    scene = Scene()
    scene.timer.receive([*ordinary(1, 100), *ordinary(2, 200)])
    scene.timer.advance(at(100))
    scene.timer.close()
    (times,) = scene.ended
    assert (times.xid, times.confirmed) == (1, None)


def test_the_number_of_open_transactions_is_limited() -> None:
    scene = Scene(limit=2)
    scene.timer.receive([payload for xid in range(1, 6) for payload in ordinary(xid, xid * 100)])
    assert scene.confirm(1000) == [("COMMIT", 1, 2), ("COMMIT", 2, 2)]
    scene.timer.receive(ordinary(9, 2000))
    assert scene.confirm(2000) == [("COMMIT", 9, 2)]


def test_damaged_payloads_are_left_to_the_loop() -> None:
    scene = Scene()
    scene.timer.receive([b"", b"w", b"w" + bytes(24) + b"B\0", b"k\0"])
    scene.timer.receive(ordinary(1, 100))
    assert scene.confirm(100) == [("COMMIT", 1, 2)]
