"""Output on a terminal has colors. Elsewhere, or with NO_COLOR, it has none (https://no-color.org)."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable

import pytest

from subscriber.cli.logs import RichHandler
from subscriber.cli.progress import ProgressLine
from subscriber.cli.status_lines import print_status
from subscriber.demo.view import open_view
from subscriber.status.model import assess
from tests.cli.test_status_report import PUBLISHER, STREAMING, SUBSCRIPTION, look

COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)[0-8](?:;\d+)*m")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def log() -> None:
    RichHandler(sys.stderr).emit(logging.makeLogRecord({"msg": "text", "levelno": logging.ERROR}))


def status() -> None:
    print_status(look(STREAMING), [assess(SUBSCRIPTION, look(STREAMING), PUBLISHER)])


def progress() -> None:
    with ProgressLine("comparing", delay=0) as line:
        line.show("comparing", 1, 2)
        assert line._timer is not None
        line._timer.join()  # until it has drawn the line


def demo() -> None:
    with open_view() as view:
        view.event("text", style="bold red")


@pytest.mark.parametrize("output", [log, status, progress, demo])
def test_a_terminal_has_colors_unless_they_are_unwanted(
    output: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> str:
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("rich._console", None)
        output()
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert COLOR.search(written())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOR.search(written())


@pytest.mark.parametrize("output", [log, status])
def test_output_that_is_no_terminal_has_no_escapes(
    output: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    output()
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert "\x1b" not in printed.out + printed.err
