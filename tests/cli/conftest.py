"""The command configures the logging of its process, which is the test's own where a test calls main()."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import typer.main

from subscriber import telemetry
from subscriber.cli import main


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, last = logging.getLogger(), logging.lastResort
    assert last is not None
    handlers, level, own, formatter = root.handlers[:], root.level, telemetry.logger.level, last.formatter
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    telemetry.logger.setLevel(own)
    telemetry.follow_servers(None)
    last.setFormatter(formatter)


@pytest.fixture
def built_app(monkeypatch: pytest.MonkeyPatch, app_of_session: object) -> None:
    """Let main() run an application that was built before. Each call would build another one, which takes 40 ms."""
    monkeypatch.setattr(main, "app", app_of_session)


@pytest.fixture(scope="session")
def app_of_session() -> object:
    return typer.main.get_command(main.app)
