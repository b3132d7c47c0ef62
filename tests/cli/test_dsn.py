"""Connection strings from other places: files, the environment, services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber.cli.dsn import read_dsn
from subscriber.errors import ConninfoError
from tests.plugins.fix_cluster import Database


def written(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def status(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "subscriber", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


async def test_a_command_takes_its_database_from_a_file(target_db: Database, tmp_path: Path) -> None:
    file = written(tmp_path / "of the target", f"  {target_db.dsn()}  \nnothing of this line is read\n")
    for done in (
        status("--target", f"@{file}"),
        status(f"--target=@{file}"),
        status(SUBSCRIBER_TARGET_DSN=f"@{file}"),
    ):
        assert (done.returncode, done.stdout) == (0, "no subscriptions\n"), done.stderr
    file.chmod(0o400)
    assert status("--target", f"@{file}").returncode == 0


async def test_a_command_takes_its_database_from_a_service(target_db: Database, tmp_path: Path) -> None:
    server = target_db.server
    lines = ["[shop]", "host=127.0.0.1", f"port={server.port}", "user=postgres", f"dbname={target_db.name}"]
    file = written(tmp_path / "services", "\n".join(lines))
    for done in (
        status("--target", "service=shop", PGSERVICEFILE=str(file)),
        status("--target", "postgresql://?service=shop", PGSERVICEFILE=str(file)),
        status("--target", "", PGSERVICEFILE=str(file), PGSERVICE="shop"),
    ):
        assert (done.returncode, done.stdout) == (0, "no subscriptions\n"), done.stderr


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_each_right_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "dsn", "postgresql://app:secret@h/db", mode)
    with pytest.raises(ConninfoError, match="has group or world access"):
        read_dsn(f"@{file}")


def test_a_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "it's", "postgresql://app:secret@h/db", 0o644)
    done = status("--target", f"@{file}")
    assert done.returncode == 3
    assert done.stderr == (
        f'ERROR:  connection string file "{file}" has group or world access\n'
        "DETAIL:  Permissions should be u=rw (0600) or less.\n"
        f"HINT:  chmod 600 '{tmp_path}/it'\"'\"'s'\n"
    )
    command = done.stderr.rpartition("HINT:  ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert read_dsn(f"@{file}") == "postgresql://app:secret@h/db"


def test_a_connection_string_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, message in (
        ("missing", f'could not open connection string file "{tmp_path}/missing": No such file or directory'),
        ("", f'could not open connection string file "{tmp_path}/": Is a directory'),
        ("pipe", f'connection string file "{tmp_path}/pipe" is not a plain file'),
        ("empty", f'connection string file "{tmp_path}/empty" has nothing in its first line'),
        ("blank", f'connection string file "{tmp_path}/blank" has nothing in its first line'),
    ):
        if name in ("empty", "blank"):
            written(tmp_path / name, "" if name == "empty" else " \nhost=h\n")
        with pytest.raises(ConninfoError) as caught:
            read_dsn(f"@{tmp_path}/{name}")
        assert caught.value.message == message


def test_other_values_stay_as_they_are() -> None:
    for value in (None, "", "host=h", "postgresql://u@h/d"):
        assert read_dsn(value) == value


def test_help_needs_no_file() -> None:
    assert status("--help", SUBSCRIBER_TARGET_DSN="@/nowhere").returncode == 0
