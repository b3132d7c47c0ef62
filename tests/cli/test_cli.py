from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert re.fullmatch(r"subscriber 0\S+ \((compiled|not compiled, so slower: .+)\)\n", run("--version").stdout)
    assert run("--version", SUBSCRIBER_PURE="1").stdout.endswith("(not compiled, so slower: SUBSCRIBER_PURE is set)\n")


def test_completion() -> None:
    """The script of bash, loaded by bash, completes a command, an option and a choice."""
    script = """
        eval "$(_SUBSCRIBER_COMPLETE=source_bash subscriber)"
        of() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _subscriber_completion subscriber; echo ${COMPREPLY[@]}; }
        of subscriber stat
        of subscriber run --takeover
        of subscriber run --log-format ""
    """
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "status\n--takeover-after\nrich json postgres\n"


def test_help_has_whole_sentences() -> None:
    summaries = run("--help").stdout.partition("Commands:")[2]
    assert "quarantine  List, show, retry, discard and edit transactions in quarantine." in summaries
    assert "..." not in summaries


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
