"""Errors of files: ownership, no space, changes by other programs, kills."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from subscriber.errors import SpoolError, SpoolFull
from subscriber.spool.spool import Spool


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path / "spool", limit=None)
    await spool.open()
    yield spool
    await spool.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- whose it is ----------------------------------------------------------------------------------


async def test_only_the_owner_may_read_the_folder(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        spool = Spool(tmp_path / "a" / "b", limit=None)
        await spool.open()
        transaction = spool.start(700, first=True)
        transaction.append(700, b"secret")
        await transaction.write()
        (file,) = (tmp_path / "a" / "b").iterdir()
        assert [mode(path) for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]
        await spool.close()
    finally:
        os.umask(umask)
    assert list((tmp_path / "a").iterdir()) == []


async def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    for target in ("elsewhere", "nowhere"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(SpoolError, match="is a symbolic link") as caught:
            await Spool(link, limit=None).open()
        assert caught.value.sqlstate == "42501"


async def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = Path("/")
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(0o700)
        os.chown(theirs, 12345, 12345)
    with pytest.raises(SpoolError, match="belongs to another user") as caught:
        await Spool(theirs, limit=None).open()
    assert caught.value.detail is not None
    assert f"runs as uid {os.geteuid()}" in caught.value.detail


async def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(SpoolError, match="invalid permissions") as caught:
        await Spool(tmp_path, limit=None).open()
    assert "mode 0750" in str(caught.value)


async def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("")
    for path in (tmp_path / "spool", tmp_path / "spool" / "worker"):
        with pytest.raises(SpoolError, match="could not prepare spool folder"):
            await Spool(path, limit=None).open()


async def test_a_link_in_the_place_of_a_file_is_not_followed(spool: Spool, tmp_path: Path) -> None:
    transaction = spool.start(700, first=True)
    transaction.append(700, b"one")
    await transaction.write()
    (file,) = (tmp_path / "spool").iterdir()
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    transaction.append(700, b"two")
    with pytest.raises(SpoolError, match="could not write to file"):
        await transaction.write()
    with pytest.raises(SpoolError, match="could not read file"):
        await anext(transaction.read())
    assert (tmp_path / "moved").stat().st_size == 8 + 3


# --- leftovers and their owners -------------------------------------------------------------------


async def test_only_files_of_an_earlier_worker_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(0o700)
    for name in ("745-0123abcd.changes", "745-0123abcd.subxacts", "notes.changes", "745.changes", "README"):
        (folder / name).write_text("x")
    spool = Spool(folder, limit=None)
    await spool.open()
    assert {path.name for path in folder.iterdir()} == {"notes.changes", "745.changes", "README"}
    await spool.close()
    await spool.close()
    assert folder.exists()  # since it is not empty


async def test_opening_removes_former_transactions(spool: Spool, tmp_path: Path) -> None:
    transaction = spool.start(700, first=True)
    transaction.append(700, b"one")
    await transaction.write()
    await spool.open()
    assert (spool.size, spool.transactions, list((tmp_path / "spool").iterdir())) == (0, {}, [])


async def test_a_worker_believed_dead_does_not_reach_its_successors_files(spool: Spool, tmp_path: Path) -> None:
    old = spool.start(700, first=True)
    old.append(700, b"old")
    await old.write()
    successor = Spool(tmp_path / "spool", limit=None)
    await successor.open()
    new = successor.start(700, first=True)
    new.append(700, b"new")
    await new.write()
    old.append(700, b"old again")
    with pytest.raises(SpoolError, match="could not write to file") as caught:
        await old.write()
    assert caught.value.hint is not None
    assert "Something else removed it" in caught.value.hint
    await old.remove()
    await spool.close()
    assert [record[2] for record in await anext(new.read())] == [b"new"]
    await successor.close()


async def test_close_leaves_nothing_also_when_cancelled(spool: Spool, tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        for xid in (700, 701):
            transaction = spool.start(xid, first=True)
            transaction.append(xid, b"one")
            await transaction.write()
        spool.start(701, first=True)
        scope.cancel()
        await spool.close()
    assert not (tmp_path / "spool").exists()


async def test_a_transaction_that_restarts_or_ends_frees_its_room(spool: Spool, tmp_path: Path) -> None:
    for first in (True, True, True):
        transaction = spool.start(700, first=first)
        transaction.append(700, b"one")
        await transaction.write()
        assert len(list((tmp_path / "spool").iterdir())) == 1
    await transaction.remove()
    await transaction.remove()
    assert (spool.size, list((tmp_path / "spool").iterdir())) == (0, [])


SPOOLING = """
import anyio, sys
from pathlib import Path
from subscriber.spool.spool import Spool

async def main():
    spool = Spool(Path(sys.argv[1]), limit=None, index_entries=100)
    await spool.open()
    print("open", flush=True)
    while True:
        for turn in range(10):
            for xid in (1000, 2000, 3000):
                transaction = spool.start(xid, first=turn == 0)
                for subxid in range(turn * 50, turn * 50 + 500):
                    if transaction.append(xid + subxid, b"x" * 200):
                        await transaction.write()
                await transaction.rollback(xid + turn * 50 + 100)
                await transaction.end_block()
        for transaction in list(spool.transactions.values()):
            await transaction.remove()

anyio.run(main)
"""


async def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    left = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", SPOOLING, str(tmp_path / "spool")], stdout=subprocess.PIPE
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"open\n"
            await anyio.sleep(random.uniform(0, 0.3))
            worker.send_signal(signal.SIGKILL)
        left += len(list((tmp_path / "spool").iterdir()))
        spool = Spool(tmp_path / "spool", limit=None)
        await spool.open()
        assert list((tmp_path / "spool").iterdir()) == []
        await spool.close()
    assert left


# --- no room --------------------------------------------------------------------------------------


async def test_the_limit_is_for_all_transactions_together(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", limit=1000)
    await spool.open()
    first, second = spool.start(700, first=True), spool.start(800, first=True)
    for transaction in (first, second):
        transaction.append(transaction.xid, b"x" * 492)
        await transaction.write()
    assert spool.size == 1000
    second.append(801, b"x")
    with pytest.raises(SpoolFull) as caught:
        await second.write()
    assert str(caught.value).splitlines() == [
        "streamed transactions exceed the spool's limit of 1000 bytes",
        "DETAIL:  The spool has 1000 bytes of 2 transactions; transaction 800 has 2 changes in 509 bytes so far.",
        "HINT:  Raise the limit, or have the publisher keep large transactions until they commit: "
        "ALTER SUBSCRIPTION … SET (streaming = off).",
    ]
    assert caught.value.sqlstate == "53400"
    await first.remove()
    await second.write()
    await second.rollback(801)
    assert spool.size == 500
    await spool.close()


FULL = """
import anyio, resource, sys
from pathlib import Path
from subscriber.errors import SpoolFull
from subscriber.spool.spool import Spool

async def main():
    spool = Spool(Path(sys.argv[1]), limit=None)
    await spool.open()
    transaction = spool.start(700, first=True)
    transaction.append(700, b"x" * 100_000)
    await transaction.write()
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    transaction.append(701, b"x" * 100_000)
    try:
        await transaction.write()
    except SpoolFull as error:
        print(error.sqlstate, error, sep="\\n")
    records = [record async for some in transaction.read() for record in some]
    print([len(message) for _, _, message in records])
    await spool.close()

anyio.run(main)
"""


def test_a_full_disk_is_told_and_what_was_written_can_be_read(tmp_path: Path) -> None:
    """The limit of the process for the size of a file stands in for the end of the disk."""
    folder = tmp_path / "spool"
    done = subprocess.run([sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, check=True)
    sqlstate, message, detail, hint, records = done.stdout.splitlines()
    assert sqlstate == "53100"
    assert message.startswith(f'could not write to file "{folder}/700-')
    assert message.endswith('.changes": File too large')
    assert detail == "DETAIL:  Transaction 700 has 2 changes in 200016 bytes so far."
    assert "Make room on that disk" in hint
    assert records == "[100000]"
    assert not folder.exists()


# --- changes by other programs --------------------------------------------------------------------


async def test_a_file_that_was_cut_or_written_over_is_not_believed(spool: Spool, tmp_path: Path) -> None:
    transaction = spool.start(700, first=True)
    for _ in range(2):
        transaction.append(700, b"x" * 100)
    await transaction.write()
    (file,) = (tmp_path / "spool").iterdir()
    os.truncate(file, 150)
    records = transaction.read()
    assert len(await anext(records)) == 1
    with pytest.raises(SpoolError, match="no whole record at offset 108"):
        await anext(records)
    file.write_bytes(b"\xff" * 216)
    with pytest.raises(SpoolError, match="no whole record at offset 0"):
        await anext(transaction.read())
