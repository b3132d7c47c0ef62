"""A program that writes a change log and is killed before each of its system calls in turn.

    python -m tests.changelog.crashing DIRECTORY

Each attempt has its own folder, named by its number. It has the log as the kill has left it, and the file "confirmed"
with the positions that a publisher could know. The last attempt is not killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from subscriber.changelog.consumers import LogRetention
from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import OPEN, Identity
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin
from tests.changelog.stream import START, Writer

CALLS = {os.open, os.mkdir, os.pwrite, os.fsync, os.ftruncate, os.rename, os.unlink}
COUNT = 6
KEEP = 700  # bytes; about two segments


def transactions() -> list[tuple[Lsn, list[bytes]]]:
    """(position of the commit record, messages) of each; all attempts and the tests have the same."""
    source = Writer()
    made = [source.transaction([(1, number), (2, 1)], describe=True) for number in range(COUNT)]
    return [(_final(messages), messages) for messages in made]


def _final(messages: list[bytes]) -> Lsn:
    begin = Decoder().decode(messages[0])
    assert isinstance(begin, Begin)
    return begin.final_lsn


def writer_of(directory: Path) -> LogWriter:
    """Return a writer that seals each segment after one or two transactions, and keeps few segments."""
    return log_writer(directory, segment_size=1, retention=LogRetention(keep_size=KEEP))


def open_log(writer: LogWriter) -> None:
    """Open the log, which is made if there is none."""
    writer.open()
    if writer.identity is None:
        writer.create(Identity(7, "s", ("p",), START))


def write(writer: LogWriter, confirm: Callable[[Lsn], None], upto: int = COUNT) -> None:
    """Store all transactions that are not stored yet, as a publisher sends them."""
    confirm(writer.position)
    builder = BlockBuilder(writer.position)
    for number, (final, messages) in enumerate(transactions()[:upto]):
        if final < writer.position:
            continue
        for message in messages:
            builder.add(message)
        writer.append(builder.take())
        writer.sync()
        confirm(writer.position)
        if number % 3 != 1:
            builder.restart()


def run(directory: Path, confirm: Callable[[Lsn], None]) -> None:
    """Write half of the transactions, leave a torn tail, and write the rest."""
    writer = writer_of(directory)
    try:
        open_log(writer)
        write(writer, confirm, COUNT // 2)
        writer.close()
        with next(directory.glob(f"*{OPEN}")).open("ab") as file:
            file.write(b"torn" * 40)
        open_log(writer)
        write(writer, confirm)
    finally:
        writer.close()


def before_call(number: int, act: Callable[[], None]) -> None:
    """Have `act` called before that call to the system, the first being 0."""
    left = number

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event == "c_call" and argument in CALLS:
            if left == 0:
                sys.setprofile(None)
                act()
            left -= 1

    sys.setprofile(profile)


def attempt(place: Path, number: int) -> None:
    """Be killed before a call to the system; if there are fewer calls, end."""
    file = os.open(place / "confirmed", os.O_CREAT | os.O_WRONLY)

    def confirm(position: Lsn) -> None:
        os.write(file, f"{position}\n".encode())

    before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(place / "log", confirm)
    os._exit(0)


def main() -> None:
    for number in count():
        place = Path(sys.argv[1]) / str(number)
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            attempt(place, number)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
