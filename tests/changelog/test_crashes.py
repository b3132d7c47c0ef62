"""The change log after a kill, and after an error of the system, at each step of its writer."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from subscriber.changelog.files import IDENTITY
from subscriber.changelog.reader import ChangeLog
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from tests.changelog.crashing import before_call, open_log, run, transactions, write, writer_of
from tests.changelog.stream import START
from tests.changelog.test_writer import Row, rows

EXPECTED: list[Row] = [
    (final, n, relid, size)
    for number, (final, _) in enumerate(transactions())
    for n, (relid, size) in enumerate([(1, number), (2, 1)])
]
END = Lsn(transactions()[-1][0] + 50)


def check(directory: Path, confirmed: Lsn) -> None:
    """Check that a reader finds all confirmed transactions, and only complete ones."""
    log = ChangeLog(directory)
    start, end = log.start(), log.end()
    assert end >= confirmed
    assert rows(log, start, end) == [row for row in EXPECTED if start <= row[0] < end]


def finish(directory: Path, confirmed: Lsn) -> None:
    """Check that the next writer finds all confirmed transactions, and write the rest. The log then has each once."""
    if (directory / IDENTITY).exists():
        check(directory, confirmed)
    writer = writer_of(directory)
    open_log(writer)
    assert writer.position >= confirmed
    write(writer, lambda _: None)
    writer.close()
    check(directory, END)


def test_a_writer_killed_before_any_system_call_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.changelog.crashing", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    attempts = list(tmp_path.iterdir())
    assert len(attempts) > 80
    for place in attempts:
        finish(place / "log", max(map(Lsn.parse, (place / "confirmed").read_text().split()), default=START))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_writer_with_an_error_at_any_system_call_loses_nothing(tmp_path: Path, code: int) -> None:
    refused, ignored = True, 0

    def refuse() -> None:
        nonlocal refused
        refused = True
        raise OSError(code, "refused")

    for number in count():
        directory, confirmed, refused = tmp_path / str(number), [START], False
        before_call(number, refuse)
        try:
            if refusal := attempt(directory, confirmed.append):
                assert refusal.message.endswith("refused")
                assert refusal.hint
        finally:
            sys.setprofile(None)
        assert refused or not refusal
        ignored += refused and not refusal
        finish(directory, confirmed[-1])
        if not refused:
            break
    assert number > 80
    assert ignored == 4  # the lock is taken twice, and its file gets the process id in two calls


def attempt(directory: Path, confirm: Callable[[Lsn], None]) -> ChangeLogError | None:
    """Write the log; the error that it ends with."""
    try:
        run(directory, confirm)
    except ChangeLogError as error:
        return error
    return None


LIMITED = """
import resource, sys
from pathlib import Path
from subscriber.errors import ChangeLogError
from tests.changelog.crashing import run

confirmed = ["0/0"]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    run(Path(sys.argv[1]), confirmed.append)
except ChangeLogError as error:
    print(confirmed[-1], error.message)
"""


@pytest.mark.parametrize("size", [10, 100, 250, 331, 420])
def test_a_file_that_cannot_grow(tmp_path: Path, size: int) -> None:
    """The limit of a process for the size of a file stands in for the end of the disk: part of a block is written."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "log"), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    confirmed, _, message = done.stdout.partition(" ")
    assert "File too large" in message
    assert all(path.stat().st_size <= size for path in (tmp_path / "log").iterdir())
    finish(tmp_path / "log", max(Lsn.parse(confirmed), START))
