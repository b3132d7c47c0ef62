"""The moments of status updates, and the timeout of the publisher."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest

from subscriber.apply.progress import Positions
from subscriber.errors import ConnectionLost
from subscriber.lsn import Lsn
from subscriber.publisher.feedback import Feedback, limit_status_interval
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import Settings


class Stream:
    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int, bool]] = []

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False) -> None:
        self.sent.append((write, flush, apply, reply_requested))


class World:
    def __init__(self, sender_timeout: float = 0, **settings: float) -> None:
        self.stream = Stream()
        self.now = Positions(Lsn(3), Lsn(1), Lsn(2))
        self.reading = True
        self.feedback = Feedback(
            cast(ReplicationStream, self.stream),
            lambda: self.now,
            reading=lambda: self.reading,
            settings=limit_status_interval(Settings.from_environment({}, **settings), sender_timeout),
        )


async def run(world: World, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await world.feedback.run()


async def test_updates_are_sent_unasked_now_and_then_and_ask_for_a_heartbeat() -> None:
    world = World(status_interval=0.05)
    await run(world, 0.18)
    assert set(world.stream.sent) == {(3, 1, 2, True)}
    assert 1 <= len(world.stream.sent) <= 3


async def test_updates_are_sent_more_often_for_a_publisher_with_a_short_timeout() -> None:
    world = World(sender_timeout=0.15)
    await run(world, 0.18)
    assert 1 <= len(world.stream.sent) <= 3


async def test_updates_are_sent_at_once_when_requested_or_when_a_position_has_moved() -> None:
    world = World()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.feedback.run)
        await anyio.wait_all_tasks_blocked()
        world.feedback.request_now()
        await anyio.wait_all_tasks_blocked()
        assert len(world.stream.sent) == 1
        world.feedback.positions_changed()  # no, it has not
        await anyio.wait_all_tasks_blocked()
        assert len(world.stream.sent) == 1
        world.now = Positions(Lsn(3), Lsn(2), Lsn(2))
        world.feedback.positions_changed()
        world.feedback.positions_changed()
        await anyio.wait_all_tasks_blocked()
        assert world.stream.sent[1:] == [(3, 2, 2, False)]
        tasks.cancel_scope.cancel()


async def test_a_silent_publisher_is_asked_and_then_given_up() -> None:
    world = World(status_interval=0.03, receiver_timeout=0.3)
    with anyio.fail_after(2), pytest.raises(ConnectionLost) as caught:
        await world.feedback.run()
    assert caught.value.message == "terminating logical replication worker due to timeout"
    assert all(reply for *_, reply in world.stream.sent)
    assert len(world.stream.sent) > 1


async def test_silence_is_measured_from_the_last_message_and_not_while_we_do_not_read() -> None:
    world = World(status_interval=0.02, receiver_timeout=0.1)
    world.reading = False
    await run(world, 0.25)
    assert not any(reply for *_, reply in world.stream.sent)
    world.reading = True
    world.feedback.data_received()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.feedback.run)
        for _ in range(10):
            await anyio.sleep(0.025)
            world.feedback.data_received()
        tasks.cancel_scope.cancel()


async def test_a_lost_stream_ends_the_feedback() -> None:
    world = World()

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionLost("gone")

    world.stream.send_status = lost  # type: ignore[method-assign]
    world.feedback.request_now()
    with pytest.raises(ConnectionLost, match="gone"):
        await world.feedback.run()
