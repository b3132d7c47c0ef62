"""Another user who may write in the directory of a change log, or of its consumers, puts links and pipes there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from subscriber.changelog.consumers import FOLDER, register
from subscriber.changelog.files import DURABLE, LOCK, open_path
from subscriber.changelog.schema_history import SCHEMA
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from tests.changelog.crashing import open_log, run, writer_of
from tests.changelog.stream import START

TEXT = "not of the log\nwithout an end"


def planted(directory: Path) -> list[Path]:
    """Return the paths that a writer opens for writing."""
    names = (LOCK, DURABLE, SCHEMA, "log.json.tmp", "timeline.json.tmp")
    return [*(directory / name for name in names), open_path(directory, START).with_suffix(".new")]


@pytest.mark.parametrize("number", range(6))
def test_a_writer_follows_no_link(tmp_path: Path, number: int) -> None:
    directory, victim = tmp_path / "log", tmp_path / "victim"
    directory.mkdir(0o770)
    victim.write_text(TEXT)
    planted(directory)[number].symlink_to(victim)
    with suppress(SubscriberError, OSError):
        run(directory, lambda _: None)
    assert victim.read_text() == TEXT


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", range(6))
def test_a_writer_waits_for_no_pipe(tmp_path: Path, number: int) -> None:
    directory = tmp_path / "log"
    directory.mkdir(0o770)
    os.mkfifo(planted(directory)[number])
    writer = writer_of(directory)
    with suppress(SubscriberError, OSError):
        open_log(writer)
    writer.close()


@pytest.mark.timeout(20)
def test_a_consumer_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    victim = tmp_path / "victim"
    victim.write_text(TEXT)
    (tmp_path / FOLDER / "lake.tmp").symlink_to(victim)
    register(tmp_path, "lake", "a test", Lsn(1))
    assert victim.read_text() == TEXT
    assert not (tmp_path / FOLDER / "lake").is_symlink()


def test_a_directory_that_everybody_may_write_has_no_log(tmp_path: Path) -> None:
    """Everybody could replace a segment by another one."""
    directory = tmp_path / "log"
    directory.mkdir()
    directory.chmod(0o777)
    writer = writer_of(directory)
    with pytest.raises(SubscriberError, match="everybody may write") as refused:
        open_log(writer)
    writer.close()
    assert refused.value.hint
    assert f"chmod o-w {directory}" in refused.value.hint
    assert list(directory.iterdir()) == []
