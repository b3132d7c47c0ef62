"""Run PostgreSQL's own tests of subscriptions against `subscriber`.

    make conformance                                  all of them
    python -m tests.conformance --major 19            on servers of PostgreSQL 19
    python -m tests.conformance 001 013               some of them
    python -m tests.conformance --native              with the server's own apply worker, to check the machine
    python -m tests.conformance --write               also write the table in docs/conformance.md

    POSTGRES_SRC    a source tree of PostgreSQL; without it Debian's is downloaded
    POSTGRES_TESTS  a directory with more test files
    POSTGRES_BIN    the programs of an installation made from it (with contrib/hstore and postgres_fdw,
                    src/test/modules/injection_points and pg_regress); without it the source is built once, which takes
                    some minutes

Downloaded and built files stay in the user's cache (build.py). The tests need perl with IPC::Run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from subscriber.demo.servers import Account
from tests.conformance.build import MAJOR, PACKAGED, Installation, find_installation
from tests.conformance.inventory import ABOUT, INSIDE, NOT_YET
from tests.documents import write_section

HERE = Path(__file__).resolve().parent
TIMEOUT = "60"  # seconds that the tests wait for anything


@dataclass(frozen=True)
class Outcome:
    name: str  # without .pl
    word: str  # passed, failed, skipped
    seconds: float
    output: str


class Run:
    """One run of some files; `directory` holds the servers' files."""

    def __init__(self, installed: Installation, directory: Path, account: Account, *, native: bool) -> None:
        self._installed = installed
        self._directory = directory
        self._account = account
        self._exec = "perl" if native else f"perl -I{HERE} -MInPlaceOfServer"
        for name in ("data", "log"):
            (directory / name).mkdir()
        for path in (directory, *directory.iterdir()):
            os.chown(path, account.uid, account.gid)

    def file(self, file: Path) -> Outcome:
        began = monotonic()
        done = subprocess.run(
            ["prove", "--failures", "--comments", "--exec", self._exec, str(file)],
            cwd=self._installed.tests,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **self._account.keywords,
        )
        word = "failed" if done.returncode else "skipped" if "Result: NOTESTS" in done.stdout else "passed"
        return Outcome(file.stem, word, monotonic() - began, done.stdout)

    def _environment(self) -> dict[str, str]:
        installed = self._installed
        return {
            "HOME": str(self._directory),
            "PATH": f"{installed.bin}:{os.environ.get('PATH', os.defpath)}",
            "PERL5LIB": str(installed.perl),
            "PG_REGRESS": str(installed.pg_regress),
            "TESTDATADIR": str(self._directory / "data"),
            "TESTLOGDIR": str(self._directory / "log"),
            "PG_TEST_TIMEOUT_DEFAULT": os.environ.get("PG_TEST_TIMEOUT_DEFAULT", TIMEOUT),
            "share_contrib_dir": "",
            "enable_injection_points": "yes" if installed.injection_points else "no",
            "with_icu": "yes" if installed.icu else "no",
            "SUBSCRIBER": f"{sys.executable} -m subscriber",
            "PYTHONPATH": str(HERE.parent.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def _check_reach(account: Account) -> None:
    """Exit with the next step where the account that PostgreSQL runs as cannot start our command."""
    program = ["/bin/sh", "-c", 'exec "$0" -c "import subscriber"', sys.executable]
    done = subprocess.run(
        program,
        cwd="/",
        env={"PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
        **account.keywords,
    )
    if done.returncode:
        closed = [str(place) for place in Path(sys.executable).resolve().parents if not place.stat().st_mode & 0o001]
        hint = f"; open its directories: chmod o+x {' '.join(closed)}" if closed else f":\n{done.stderr}"
        sys.exit(f"the account that runs PostgreSQL cannot run {sys.executable}{hint}")


def main() -> int:
    options = _options()
    installed = find_installation(options.major)
    files = installed.files
    if options.files:
        files = [file for file in files if any(file.stem.startswith(wanted) for wanted in options.files)]
    account = Account.current()
    if not options.native:
        _check_reach(account)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="subscriber-conformance-", dir="/tmp") as place:
        run = Run(installed, Path(place), account, native=options.native)
        for file in files:
            outcome = run.file(file)
            outcomes.append(outcome)
            print(f"{file.stem:<32}{outcome.word:<9}{outcome.seconds:6.1f} s", flush=True)
            if outcome.word == "failed" and not options.quiet:
                print(re.sub(r"(?m)^", "    ", outcome.output), flush=True)
        if options.keep:
            kept = Path(tempfile.mkdtemp(prefix="subscriber-conformance-logs-"))
            (Path(place) / "log").rename(kept / "log")
            print(f"logs: {kept}/log")
    passed = sum(outcome.word == "passed" for outcome in outcomes)
    print(f"passed {passed} of {len(outcomes)}")
    if options.write:
        section = "results" if options.major == MAJOR else f"results of {options.major}"
        write_section(HERE.parent.parent / "docs/conformance.md", section, _table(outcomes, installed))
    expected = INSIDE.keys() | NOT_YET.keys()
    return int(any(outcome.word == "failed" and outcome.name not in expected for outcome in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="how a file's name begins; all without any")
    parser.add_argument("--major", type=int, choices=(MAJOR, PACKAGED), default=MAJOR, help="the version of PostgreSQL")
    parser.add_argument("--native", action="store_true", help="leave the server's own apply worker in")
    parser.add_argument("--write", action="store_true", help="write the table in docs/conformance.md")
    parser.add_argument("--keep", action="store_true", help="keep the servers' logs")
    parser.add_argument("--quiet", action="store_true", help="not the output of files that fail")
    return parser.parse_args()


def _table(outcomes: list[Outcome], installed: Installation) -> str:
    lines = [f"PostgreSQL {installed.version}'s tests:", "", "| file | about | result |", "|---|---|---|"]
    for outcome in outcomes:
        why = INSIDE.get(outcome.name) or NOT_YET.get(outcome.name) if outcome.word == "failed" else None
        word = f"{outcome.word}: {why}" if why else outcome.word
        lines.append(f"| `{outcome.name}` | {ABOUT.get(outcome.name, '')} | {word} |")
    passed = sum(outcome.word == "passed" for outcome in outcomes)
    return "\n".join([*lines, "", f"{passed} of {len(outcomes)} passed."])


if __name__ == "__main__":
    sys.exit(main())
