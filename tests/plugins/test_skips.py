"""A skip fails in continuous integration unless its reason is on the list."""

from __future__ import annotations

import pytest

from tests.plugins.fix_skips import VARIABLE, is_allowed

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_without_docker():
    pytest.skip("Docker does not answer: no such file")

def test_without_fish():
    pytest.skip("fish is not installed (Debian: apt-get install fish)")

@pytest.mark.skipif(True, reason="zsh is not installed (Debian: apt-get install zsh)")
def test_without_zsh(): ...

@pytest.fixture
def server():
    pytest.skip("no PostgreSQL 19: apt has no source")

def test_without_server(server): ...

@pytest.mark.xfail(reason="a known defect")
def test_expected_failure():
    assert False

def test_passes(): ...
"""
MODULE = "import pytest\npytest.importorskip('nosuch')\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {"passed": 1, "skipped": 5, "xfailed": 1}),
        ("listed", {"passed": 1, "skipped": 1, "failed": 1, "errors": 3, "xfailed": 1}),
        ("listed fish curl", {"passed": 1, "skipped": 2, "errors": 3, "xfailed": 1}),
    ],
)
def test_other_skips_fail(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: str | None, expected: dict[str, int]
) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    pytester.makepyfile(test_all=TESTS, test_module=MODULE)
    plugins = [word for name in ("no:cacheprovider", "no:asyncio", "tests.plugins.fix_skips") for word in ("-p", name)]
    result = pytester.runpytest(*plugins, "--continue-on-collection-errors")
    result.assert_outcomes(**expected)
    if value is not None:
        result.stdout.fnmatch_lines(["*skipped for a reason that is not in tests.plugins.fix_skips: no PostgreSQL 19*"])


def test_packages_that_could_not_be_installed_allow_their_skips() -> None:
    reason = "MariaDB is not installed (Debian: apt-get install mariadb-server-core mariadb-client-core), and there"
    assert not is_allowed(reason)
    assert not is_allowed(reason, ["mariadb"])
    assert is_allowed(reason, ["mariadb-client-core"])
