from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

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


def test_the_option_version_names_the_version_and_whether_it_is_compiled() -> None:
    assert re.fullmatch(r"subscriber 0\S+ \((compiled|not compiled, so slower: .+)\)\n", run("--version").stdout)
    assert run("--version", SUBSCRIBER_PURE="1").stdout.endswith("(not compiled, so slower: SUBSCRIBER_PURE is set)\n")


# Loads the script of a shell in that shell, and lets it complete a command, an option and a choice.
COMPLETIONS = {
    "bash": """
        eval "$(_SUBSCRIBER_COMPLETE=source_bash subscriber)"
        of() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _subscriber_completion subscriber; echo ${COMPREPLY[@]}; }
        of subscriber stat
        of subscriber run --takeover
        of subscriber run --log-format ""
    """,
    "fish": """
        _SUBSCRIBER_COMPLETE=source_fish subscriber | source
        complete --do-complete "subscriber stat"
        complete --do-complete "subscriber run --takeover"
        complete --do-complete "subscriber run --log-format "
    """,
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion_is_loaded_and_asked(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: apt-get install {shell})")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    command = [shell, "-c", COMPLETIONS[shell]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=100)
    for word in ("status", "--takeover-after", "rich", "json", "postgres"):
        assert re.search(rf"(^|\s){word}\b", done.stdout), done.stdout


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed (Debian: apt-get install zsh)")
def test_completion_in_a_terminal_of_zsh(tmp_path: Path) -> None:
    """A zsh completes only words that are typed."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}
    terminal, inside = pty.openpty()
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=inside, stdout=inside, stderr=inside, env=environment) as zsh:
        os.close(inside)
        seen = b""

        def type_until(keys: str, word: str) -> None:
            nonlocal seen
            os.write(terminal, keys.encode())
            seen, ends = b"", monotonic() + 60
            while word.encode() not in seen and monotonic() < ends:
                if select.select([terminal], [], [], 0.1)[0]:
                    seen += os.read(terminal, 10_000)
            assert word.encode() in seen, seen

        try:
            type_until("autoload -Uz compinit && compinit -D -u\n", "compinit")
            type_until('eval "$(_SUBSCRIBER_COMPLETE=source_zsh subscriber)"; print rea""dy\n', "ready")
            type_until("subscriber stat\t", "status")
            type_until("\x15subscriber run --takeover\t", "--takeover-after")
            type_until("\x15subscriber run --log-format \t", "postgres")
        finally:
            zsh.kill()
    os.close(terminal)


def test_help_has_whole_sentences() -> None:
    summaries = " ".join(run("--help").stdout.partition("Commands:")[2].split())
    assert "quarantine List, show, retry, discard and edit transactions in quarantine." in summaries
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
