"""The line of progress on stderr: on a terminal only, not with --json, and not before its time."""

from __future__ import annotations

import io
import sys

import pytest

from subscriber.cli.progress import ProgressLine
from tests.cli.test_colors import Terminal


def written(phase: str, stderr: io.StringIO, *, json: bool = False, delay: float = 0) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stderr", stderr)
        with ProgressLine(phase, json=json, delay=delay) as line:
            if line._timer is not None and not delay:
                line._timer.join()  # until it has drawn the line
            line.show("applying", 1, 4)
            print("a result")  # stdout is no terminal: the line leaves it alone
    return stderr.getvalue()


def test_a_terminal_shows_a_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    shown = written("connecting", Terminal())
    assert "applying: 25 % of 4 B" in shown
    assert "a result" not in shown
    assert capsys.readouterr().out == "a result\n"


def test_progress_is_shown_neither_off_a_terminal_nor_with_json_nor_too_early() -> None:
    assert written("connecting", io.StringIO()) == ""
    assert written("connecting", Terminal(), json=True) == ""
    assert written("connecting", Terminal(), delay=60) == ""  # the command was quicker
