"""Skipped tests in continuous integration: a skip fails, unless its reason is one of ALLOWED.

A test that needs a program is skipped where the program is missing. On a machine that has to have it, the skip would be
green and test nothing.

SUBSCRIBER_TEST_SKIPS   `listed` makes other skips fail; `.ci/run` sets it. The words behind it are Debian packages that
                        could not be installed. They allow the skips that ask for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from typing import TypeVar

import pytest

VARIABLE = "SUBSCRIBER_TEST_SKIPS"

# Patterns of reasons, which match at the beginning.
ALLOWED = {
    "no container runs here": r"Docker does not answer|there is no docker command",
    "another major version has the behavior": r"(before|since) PostgreSQL \d+ a missing publication is",
    "the wheel's server is built without TLS; Debian's is tested in the same test": r"this server has no TLS",
    "the publisher of a run cannot do it": r"needs a publisher that can alter",
    "PostgreSQL's own subscription fails with the random tables of a run": (
        r"the publisher cannot decode its own log|PostgreSQL's own apply worker|PostgreSQL's own subscription does not"
    ),
    "a container may forbid to stop processes": r"gdb cannot stop a process here",
    "the run is not root's": r"only root ",
    "the checkout is an archive": r"the files of a checkout are not known without git",
    "a mirror refuses tables without a key": r"the target has no tables without key",
    "this PgBouncer can more than others": r"this PgBouncer passes replication connections on",
    "the limits of the container": r"this process may not open so many files",
}
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)
_ASKED = re.compile(r"\(Debian: apt-get install ([^)]*)\)")


def is_allowed(reason: str, missing: Sequence[str] = ()) -> bool:
    """Return True if a test may be skipped for that reason.

    Args:
        reason: the reason.
        missing: packages that could not be installed.
    """
    asked = _ASKED.search(reason)
    if asked is not None and not {*asked[1].split()}.isdisjoint(missing):
        return True
    return any(re.match(pattern, reason) for pattern in ALLOWED.values())


def _missing() -> list[str] | None:
    """Return the packages that could not be installed. None: all skips are allowed."""
    words = os.environ.get(VARIABLE, "").split()
    return words[1:] if words[:1] == ["listed"] else None


def _failed(report: _Report) -> _Report:
    """Return the report, as a failure if its skip is not allowed."""
    missing = _missing()
    if missing is None or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not is_allowed(reason, missing):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that is not in {__name__}: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that it sees the final outcome
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail."""
    return _failed((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that it sees the final outcome
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a skipped module fail."""
    return _failed((yield))
