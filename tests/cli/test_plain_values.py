"""Options are converted without pydantic where Typer's conversion changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

PORT = 1  # nothing listens there


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "subscriber", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--json", "--setting", "retry_interval=1"),
        ("migrate", "status", "s", "--source", f"host=127.0.0.1 port={PORT}"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_pydantic_is_not_imported(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--target", f"host=127.0.0.1 port={PORT}")
    assert " pydantic" not in done.stderr
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(("option", "value"), [("--jobs", "many"), ("--engine", "none")])
def test_a_value_that_typer_refuses(option: str, value: str) -> None:
    done = run("verify", "s", "--target", f"host=127.0.0.1 port={PORT}", option, value)
    assert done.returncode == 2
