"""The public interface: exports, commands, license. Names may be added, but not removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.core
import typer.main

import subscriber
from subscriber.cli.main import app

ROOT = Path(__file__).parent.parent.parent
EXPORTS = {
    "HookCall",
    "HookEvent",
    "Migration",
    "MigrationStatus",
    "MoveHook",
    "MoveOptions",
    "MoveResult",
    "Rehearsal",
    "ServerStatus",
    "Standing",
    "StartOptions",
    "Step",
    "StepEvent",
    "move_database",
    "NOT_SENT",
    "UNCHANGED",
    "App",
    "ApplyError",
    "CatalogMoved",
    "Change",
    "Column",
    "Conflict",
    "ConnectionLost",
    "ConninfoError",
    "Consumer",
    "Database",
    "Delete",
    "Hook",
    "HookError",
    "Hooks",
    "Insert",
    "Kind",
    "Lsn",
    "MappingError",
    "Message",
    "Missing",
    "PasswordRequest",
    "ProtocolError",
    "PublisherError",
    "PublisherReplaced",
    "Relation",
    "Remedy",
    "Resolver",
    "Row",
    "RunningCommand",
    "ServerError",
    "Settings",
    "SlotLost",
    "StatementError",
    "Stream",
    "SubscriberError",
    "Subscription",
    "Target",
    "Transaction",
    "Truncate",
    "Update",
    "connect",
    "ConflictDetected",
    "ConflictRecord",
    "Dsn",
    "Event",
    "Finding",
    "LagCrossed",
    "StateChanged",
    "SubscriptionStatus",
    "SubscriptionFailed",
    "TableStateChanged",
    "WaitTimeout",
    "WorkerFailed",
    "consume",
    "hooks_from",
    "apply_to",
    "mirror",
    "set_password_function",
    "stream",
}


def commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return {name: command for name, command in group.commands.items() if isinstance(command, typer.core.TyperCommand)}


def test_the_package_exports_exactly_its_public_api() -> None:
    assert set(getattr(subscriber, "__all__", [])) == EXPORTS
    for name in EXPORTS:
        assert getattr(subscriber, name).__doc__


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "subscriber" / "py.typed").exists()


def test_the_licence_is_there() -> None:
    assert "PostgreSQL License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_readme_has_every_command(name: str) -> None:
    assert f"subscriber {name}" in (ROOT / "README.md").read_text()
    assert commands()[name].help


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-spark.lock"])
def test_a_lock_names_no_place_and_every_hash(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "://" not in text
    assert "file:" not in text
    assert text.count("==") <= text.count("--hash=sha256:")


def test_both_locks_have_the_same_versions() -> None:
    """The lock of Spark is installed last, and would replace the version of the other one."""
    first, last = (
        dict(re.findall(r"^(\S+)==(\S+)", (ROOT / lock).read_text(), flags=re.MULTILINE))
        for lock in ("requirements.lock", "requirements-spark.lock")
    )
    assert {name: last[name] for name in first.keys() & last.keys()} == {
        name: first[name] for name in first.keys() & last.keys()
    }


@pytest.mark.parametrize(("facade", "private"), [(subscriber.Stream, set[str]()), (subscriber.Transaction, {"_state"})])
def test_a_facade_shows_its_documented_members_only(facade: type, private: set[str]) -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    section = page.split(f"\n### subscriber.{facade.__name__}\n")[1].split("\n### ")[0]
    documented = set(re.findall(r"^#### (\w+)$", section, flags=re.MULTILINE))
    members = {name for name in dir(facade) if not name.startswith("__")}
    assert members == documented | private
