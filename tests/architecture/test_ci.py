"""`.ci/run` installs what is missing, and names what it could not install. Its programs are replaced here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "chromium",
    "mariadbd",
    "my_print_defaults",
    "prometheus",
    "fish",
    "zsh",
    "gdb",
    "groff",
    "openssl",
    "ps",
    "npm",
)


class Machine:
    """A checkout, and all programs of a machine."""

    def __init__(self, directory: Path, *, root: bool, apt: bool, servers: str = "") -> None:
        """Create the machine.

        Args:
            directory: for its files.
            root: the run is root's.
            apt: apt works: a package becomes the program of its name.
            servers: a pattern of servers that cannot be fetched.
        """
        self.bin = directory / "bin"
        (directory / "checkout/.ci").mkdir(parents=True)
        (directory / "checkout/.venv/bin").mkdir(parents=True)
        self.bin.mkdir()
        self.run_file = directory / "checkout/.ci/run"
        shutil.copy(ROOT / ".ci/run", self.run_file)
        for name in ("dirname", "sh", "touch", "chmod"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.program("id", f"echo {0 if root else 1000}")
        self.program("make", 'echo "make $* [$SUBSCRIBER_TEST_SKIPS]"')
        installed = 'for last; do :; done; case "$*" in *update) ;; *) touch "$BIN/$last"; chmod +x "$BIN/$last";; esac'
        self.program("apt-get", f'echo "apt $*" >> "$LOG"; {installed if apt else "exit 100"}')
        python = directory / "checkout/.venv/bin/python"
        python.write_text(f'#!/bin/sh\ncase "$*" in {servers or "none"}) exit 1;; esac\n')
        python.chmod(0o755)
        self.log = directory / "log"

    def program(self, name: str, script: str = "") -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self) -> list[str]:
        """Run it. Returns the lines of its output."""
        self.log.write_text("")
        environment = {"PATH": str(self.bin), "BIN": str(self.bin), "LOG": str(self.log)}
        done = subprocess.run([str(self.run_file)], env=environment, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    def installed(self) -> list[str]:
        """Return the packages that the last run has installed."""
        return [line.split()[-1] for line in self.log.read_text().splitlines() if " install " in line]


def test_ci_installs_no_package_when_none_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, root=True, apt=True)
    for name in PROGRAMS:
        machine.program(name)
    assert machine.run() == ["make venv []", "make test [listed]"]
    assert machine.log.read_text() == ""


def test_root_installs_what_is_missing_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, root=True, apt=True)
    for name in PROGRAMS:
        if name not in ("fish", "zsh"):
            machine.program(name)
    assert machine.run()[-1] == "make test [listed]"
    assert machine.installed() == ["fish", "zsh"]
    assert machine.log.read_text().count("update") == 1
    assert machine.run()[-1] == "make test [listed]"
    assert machine.installed() == []


@pytest.mark.parametrize(("root", "apt"), [(True, False), (False, True)])
def test_packages_that_cannot_be_installed_are_named(tmp_path: Path, root: bool, apt: bool) -> None:
    machine = Machine(tmp_path, root=root, apt=apt, servers="*debian*19|*pgbouncer")
    for name in PROGRAMS:
        if name not in ("fish", "chromium"):
            machine.program(name)
    missing = "chromium fish postgresql-19 pgbouncer"
    assert machine.run() == [
        "make venv []",
        f"Tests that need these packages are skipped: {missing}",
        f"make test [listed {missing}]",
    ]


def test_the_ci_script_is_executable() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
