"""The records of steps on a server that cannot store them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from subscriber.errors import ConnectionLost
from subscriber.migration.plan import Side
from subscriber.migration.results import StepEvent
from subscriber.migration.runner import StepRunner
from subscriber.migration.server import MoveServer


class LostServer:
    """A server whose connection is lost."""

    side = Side.TARGET

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Any]:
        if self.side is Side.TARGET:
            raise ConnectionLost("the target is not connected")
        yield


async def test_a_step_whose_record_is_not_stored_is_done_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    events: list[StepEvent] = []

    async def work() -> None:
        pass

    runner = StepRunner("move", "start", [], events.append)
    await runner.run("subscribe", cast(MoveServer, LostServer()), work)
    assert [event.state for event in events] == ["begin", "done"]
    (record,) = caplog.records
    assert 'step "subscribe" of the move is not recorded on the target' in record.getMessage()
    assert "the target is not connected" in record.getMessage()
