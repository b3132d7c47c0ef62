"""A command's arguments in the process list."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from subscriber.cli.arguments import hidden
from tests import passwords
from tests.processes import command_line, popened

MARK = f"{passwords.MARK}:/word"
ENCODED = f"{passwords.MARK}%3A%2Fword"
pytestmark = pytest.mark.new_interpreter  # `ps` shows the arguments that Python was started with
needs_ps = pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed (Debian: apt-get install procps)")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere arguments stay as they are")


@pytest.fixture
def silent() -> Iterator[int]:
    """Yield the port of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(pid: int, word: str) -> list[str]:
    """Return the arguments of the process once `word` is among them."""
    deadline = monotonic() + 20
    while monotonic() < deadline:
        arguments = command_line(pid)
        if any(word in argument for argument in arguments):
            return arguments
        sleep(0.01)
    pytest.fail(f"{command_line(pid)} never has {word}")


def listed(pid: int) -> str:
    """Return the line of `ps`."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Argument, and its text in the process list; {port} is that of the silent server.
FORMS = [
    (f"postgresql://app:{ENCODED}@127.0.0.1:{{port}}/db", "postgresql://app:********@127.0.0.1:{port}/db"),
    (f"postgresql://127.0.0.1:{{port}}/?password={ENCODED}&user=u", "postgresql://127.0.0.1:{port}/?password=********&user=u"),
    (f"host=127.0.0.1 port={{port}} password='{MARK} x' user=u", "host=127.0.0.1 port={port} password=******** user=u"),
    ("host=127.0.0.1 port={port} password=x user=u", "host=127.0.0.1 port={port} password=* user=u"),
]  # fmt: skip


@linux_only
@needs_ps
@pytest.mark.parametrize(("given", "shown"), FORMS)
@pytest.mark.parametrize("style", ["separate", "joined"])
def test_a_running_command_shows_no_password(silent: int, given: str, shown: str, style: str) -> None:
    dsn, expected = given.format(port=silent), shown.format(port=silent)
    options = ["--target", dsn] if style == "separate" else [f"--target={dsn}"]
    with running(sys.executable, "-m", "subscriber", "status", *options, "--json", "ä") as process:
        arguments = wait_for(process.pid, "password=*" if "password=" in given else "app:*")
        line = listed(process.pid)
    after = ["--target", expected] if style == "separate" else [f"--target={expected}"]
    assert arguments == [sys.executable, "-m", "subscriber", "status", *after, "--json", "ä"]
    assert line.split() == " ".join(arguments).split()


@linux_only
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--target", "{dsn}"],
        ["run", "--target", "host=127.0.0.1 port={port}", "--apply-target", "{dsn}"],
        ["check", "--target", "{dsn}", "--source", "{dsn}", "--publication", "p"],
        ["tail", "--source", "{dsn}", "--publication", "p"],
        ["archive", "--source", "{dsn}", "--publication", "p", "--directory", "{folder}"],
        ["verify", "--target", "{dsn}", "s"],
        ["verify", "--target", "host=127.0.0.1 port={port}", "--apply-target={dsn}", "s"],
        ["exec", "--target", "host=127.0.0.1 port={port}", "CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_hides_a_password_in_its_arguments(silent: int, tmp_path: Path, arguments: list[str]) -> None:
    dsn = f"host=127.0.0.1 port={silent} password={MARK}"
    given = [argument.format(dsn=dsn, port=silent, folder=tmp_path) for argument in arguments]
    with running(sys.executable, "-m", "subscriber", *given) as process:
        shown = wait_for(process.pid, "password=********")
    assert shown[3:] == [argument.replace(MARK, "********") for argument in given]


@linux_only
def test_the_installed_script_hides_a_password_in_its_arguments(silent: int, tmp_path: Path) -> None:
    """As pip makes it: the kernel puts the interpreter of its first line in front of the arguments."""
    script = tmp_path / "subscriber"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom subscriber.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    with running(str(script), "status", "--target", f"postgresql://app:{ENCODED}@127.0.0.1:{silent}/db") as process:
        arguments = wait_for(process.pid, "app:********@")
    assert arguments[1:] == [str(script), "status", "--target", f"postgresql://app:********@127.0.0.1:{silent}/db"]


@linux_only
def test_arguments_are_not_overwritten_when_they_are_not_where_they_were() -> None:
    script = (
        "import sys, time; from subscriber.cli.arguments import hide_passwords;"
        " sys.orig_argv.append('--target=a:b@c'); hide_passwords(); print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, f"--target=u:{MARK}@h"]
    with popened(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert command_line(process.pid) == command


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "--target", "a b"], ["run", "--target", "a b"]),
        (["--target", f"password=a {MARK}"], ["--target", "password=********"]),
        (["--source=u:x@h"], ["--source=u:*@h"]),
        (["--apply-target=u:x@h"], ["--apply-target=u:*@h"]),
        (["--target"], ["--target"]),
        ([f"DROP SUBSCRIPTION s 'password={MARK}' x"], ["DROP SUBSCRIPTION s 'password=********' x"]),
        (["--target", "@/run/secrets/dsn"], ["--target", "@/run/secrets/dsn"]),
    ],
)  # fmt: skip
def test_hidden_arguments_are_not_longer(arguments: list[str], shown: list[str]) -> None:
    assert hidden(arguments) == shown


@needs_ps
def test_a_command_without_a_password_stays_as_it_is(silent: int) -> None:
    command = [sys.executable, "-m", "subscriber", "status", "--target", f"host=127.0.0.1 port={silent}"]
    with running(*command) as process:
        assert listed(process.pid).rstrip("\n") == " ".join(command)
