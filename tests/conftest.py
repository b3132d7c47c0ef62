"""The plugins, and the distribution of a run over processes. Every fixture is in the package of its subject."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.cache import cache_directory

# Tests start the command hundreds of times. Where Python may write no bytecode, as in many containers, each start would
# compile the package again, which takes longer than its work. This process would compile its tests again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(cache_directory("bytecode")))
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]

# A shell starts a run in the background with SIGINT ignored, and so would be every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example may take any time. The timeout of pytest still ends a test that hangs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("patient"), max_examples=15)  # for tests that run a second time
settings.load_profile("patient")

pytest_plugins = [
    "tests.plugins.fix_passwords",
    "tests.plugins.fix_cluster",
    "tests.plugins.fix_forked",
    "tests.plugins.fix_google_storage",
    "tests.plugins.fix_hostile",
    "tests.plugins.fix_logging",
    "tests.plugins.fix_object_store",
    "tests.plugins.fix_proxy",
    "tests.plugins.fix_skips",
    "tests.plugins.fix_subscriber",
    "tests.plugins.fix_unclosed",
]


# Fixtures that start programs for a whole run, and the group of the tests that use them.
GROUPS = {
    "spark": "spark",
    "server_of": "versions",
    "tracking_of": "versions",
    "tracking": "tracking",
    "pglogical_servers": "pglogical",
    "object_server": "objects",
    "made_archive": "archive of classes",
    "grouped": "groups",  # of the test of groups
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist writes the groups into the names of the tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with the same expensive fixture in one process."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if group := next((group for fixture, group in GROUPS.items() if fixture in fixtures), None):
            item.add_marker(pytest.mark.xdist_group(group))
        elif item.path.parent.name == "vendor":
            item.add_marker(pytest.mark.xdist_group("vendor"))
        elif isinstance(major := _parameters(item).get("target"), int):  # the version of a server
            item.add_marker(pytest.mark.xdist_group(f"target of {major}"))


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def pytest_collection_finish() -> None:
    """Exclude thousands of tests from garbage collection."""
    gc.collect()
    gc.freeze()
