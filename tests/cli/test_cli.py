from __future__ import annotations

import subprocess
import sys

import pytest

from subscriber.cli import main
from subscriber.errors import ConnectionLost, StatementError


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "subscriber", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_nothing_heavy_is_imported_for_help_and_exec() -> None:
    script = "import sys, subscriber.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"alembic", "anyio", "asyncio", "asyncpg", "rich", "sqlalchemy", "pyspark", "uvloop"}
    assert heavy.isdisjoint(done.stdout.split())


def test_a_dsn_may_come_from_the_environment_and_is_never_shown() -> None:
    done = run("run", "--help", SUBSCRIBER_TARGET_DSN="postgresql://u:secret@h/d")
    assert done.returncode == 0
    assert "SUBSCRIBER_TARGET_DSN" in done.stdout
    assert "secret" not in done.stdout


def test_a_command_used_wrongly_exits_2() -> None:
    done = run("status")
    assert done.returncode == 2
    assert "--target" in done.stderr


def test_version() -> None:
    assert run("--version").stdout.startswith("subscriber 0.")


def test_an_error_is_printed_with_its_parts_and_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        first = StatementError("wrong", detail="It is.", hint="Correct it.")
        raise ExceptionGroup("tasks", [first, ConnectionLost("gone")])

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 3
    assert capsys.readouterr().err == "ERROR:  wrong\nDETAIL:  It is.\nHINT:  Correct it.\nERROR:  gone\n"
