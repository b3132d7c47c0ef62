"""Fail each test that has made a password visible.

The passwords of tests contain MARK. A test fails if the mark is in one of these, with the place where it was found:

    its captured stdout, stderr and log          also where the test reads them itself, as capfd does
    the records of the package                   with all their parts, and not only the message
    the output of programs that it runs          by subprocess, asyncio and anyio, and the log of `subscriber run`
    the arguments of programs that it starts     by the package, because every user of the machine can list them
    the statements of sessions, and servers' logs

A test that has to print a password is marked: @pytest.mark.prints_password("reason").
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import sysconfig
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import subscriber
from subscriber import telemetry
from tests.passwords import MARK

PACKAGE = str(Path(subscriber.__file__).parent)
# Libraries, code without a file, and the modules that start the programs of tests.
PASSED_OVER = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<", f"{PACKAGE}/demo/")
BEFORE, AFTER = 200, 40  # characters that are shown around a mark

_found: list[str] = []
_lengths: dict[Path, int] = {}  # of the files of watch_file(), as far as they have been searched


def search(text: str | bytes | None, place: str) -> None:
    """Fail the running test at its end if the text has the mark. `place` says what the text is."""
    if isinstance(text, bytes):  # decoding megabytes that are not text takes seconds
        at = text.find(MARK.encode())
        text = "" if at < 0 else text[max(0, at - BEFORE) : at + AFTER].decode(errors="replace")
    if text and (at := text.find(MARK)) >= 0:
        _found.append(f"{place}: …{text[max(0, at - BEFORE) : at + AFTER]}…")


def watch_file(file: Path) -> None:
    """Search what is appended to a file from now on, at the end of each test."""
    _lengths[file] = file.stat().st_size if file.exists() else 0


def _search_files() -> None:
    for file, searched in _lengths.items():
        if file.exists() and file.stat().st_size > searched:
            with file.open("rb") as stream:
                stream.seek(searched)
                text = stream.read()
            _lengths[file] = searched + len(text)
            search(text, str(file))


class _RecordSearch(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        search(f"{record.getMessage()} {record.__dict__.get('parts')}", "log record")


@pytest.fixture(scope="session", autouse=True)
def searched_outputs() -> Iterator[None]:
    """Search outputs that pytest does not capture."""
    handler = _RecordSearch()
    telemetry.logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        _search_result(patch, subprocess.Popen, "communicate")
        _search_received(patch)
        patch.setattr(subprocess.Popen, "__init__", _searching_arguments(subprocess.Popen.__init__))
        patch.setattr(asyncio, "create_subprocess_exec", _searching_arguments(asyncio.create_subprocess_exec))
        patch.setattr(asyncio, "create_subprocess_shell", _searching_arguments(asyncio.create_subprocess_shell))
        _search_result(patch, pytest.CaptureFixture, "readouterr")
        yield
    telemetry.logger.removeHandler(handler)


def _search_result(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Search the texts that a method returns, each time it is called."""
    method = getattr(owner, name)

    @wraps(method)
    def searched(*args: Any, **kwargs: Any) -> Any:
        texts = method(*args, **kwargs)
        for text in texts:
            search(text, f"result of {name}()")
        return texts

    patch.setattr(owner, name, searched)


def _search_received(patch: pytest.MonkeyPatch) -> None:
    """Search the output of asyncio's processes, in pieces that overlap."""
    method = SubprocessStreamProtocol.pipe_data_received
    ends: WeakKeyDictionary[SubprocessStreamProtocol, dict[int, bytes]] = WeakKeyDictionary()

    def searched(protocol: SubprocessStreamProtocol, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        of_protocol = ends.setdefault(protocol, {})
        piece = of_protocol.get(fd, b"") + data
        search(piece, "output of an asyncio process")
        of_protocol[fd] = piece[-len(MARK) :]
        method(protocol, fd, data)

    patch.setattr(SubprocessStreamProtocol, "pipe_data_received", searched)


def _is_started_by_package(frame: FrameType | None) -> bool:
    """Return True if a module of the package is the caller, and not a test that the package has called back."""
    while frame is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _searching_arguments(start: Callable[..., Any]) -> Callable[..., Any]:
    """Search the arguments of each process that a module of the package starts. Tests may give a password to psql."""

    @wraps(start)
    def searched(*args: Any, **kwargs: Any) -> Any:
        if _is_started_by_package(sys._getframe(1)):
            search(repr([argument for argument in args if not isinstance(argument, subprocess.Popen)]), "arguments")
        return start(*args, **kwargs)

    return searched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        for title, text in report.sections:
            search(text, title)
        _search_files()
        places = list(dict.fromkeys(_found))
        _found.clear()
        exempt = item.get_closest_marker("prints_password")
        if exempt is not None and not (exempt.args and isinstance(exempt.args[0], str)):
            places = ["the mark prints_password needs a reason"]
        elif exempt is not None:
            places = []
        if places and report.passed:
            report.outcome = "failed"
            report.longrepr = "a password is visible\n" + "\n".join(places)
    return report
