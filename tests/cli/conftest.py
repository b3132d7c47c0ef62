"""The application of the command, which main() runs in the process of a test."""

from __future__ import annotations

import pytest
import typer.main

from subscriber.cli import main


@pytest.fixture
def built_app(monkeypatch: pytest.MonkeyPatch, app_of_session: object) -> None:
    """Let main() run an application that was built before. Each call would build another one, which takes 40 ms."""
    monkeypatch.setattr(main, "app", app_of_session)


@pytest.fixture(scope="session")
def app_of_session() -> object:
    return typer.main.get_command(main.app)
