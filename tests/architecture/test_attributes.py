"""Objects are complete when they are made: who assigns attributes of whom."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.architecture.source import FILES, nodes

# Their public attributes are Final, so mypy refuses each assignment but the one in __init__(). Attributes that they
# change themselves are private, or properties.
COMPLETE = (
    "ConflictDetector",
    "ConflictResolution",
    "InFlightBatches",
    "PostgresTarget",
    "RowApplier",
    "TargetSession",
    "WorkerSession",
)
# Set by the apply loop or by the object itself, and why.
EXCEPT = {
    ("PostgresTarget", "on_progress"): "an attribute of every Target",
    ("PostgresTarget", "origin"): "an attribute of every Target",
    ("PostgresTarget", "wording"): "an attribute of every Target",
    ("PostgresTarget", "row_by_row_reasons"): "an attribute of every Target",
    ("ConflictResolution", "refusal"): "the conflict that ends the session, which it finds",
    ("InFlightBatches", "applied"): "a count",
    ("InFlightBatches", "applied_beside"): "a count",
}
# Assignments to attributes of other objects in the package. The numbers may only fall. An object that the same function
# has made by a call of its class is being constructed, and nobody else has it: such assignments are counted apart.
OTHERS = 111
CONSTRUCTED = 52
# Plain counts, which an apply loop increments for each transaction: a method call would cost more than the count.
COUNTS = {"counters", "_counters"}
# Attributes of objects of libraries, whose classes have no method for it.
LIBRARIES = {
    "catalog/connection.py": {"_top_xact"},
    "cli/main.py": {"message"},
    "cli/progress.py": {"daemon"},
    "connection/authentication.py": {"_transport", "_loop"},
    "connection/errors.py": {"args"},
    "connection/session.py": {"_aborted", "_protocol"},
    "connection/tls.py": {"verify_mode", "verify_flags"},
    "spark/session.py": {"_gateway", "_jvm", "tb_next"},
    "spark/tables/hive.py": {"cols"},
    "spark/tables/iceberg_types.py": {"spec_id"},
}


@pytest.mark.xdist_group("architecture")
def test_sessions_are_complete_when_they_are_made() -> None:
    classes = set()
    for file in FILES.values():
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and node.name in COMPLETE:
                classes.add(node.name)
                for part in ast.walk(node):
                    for target in _assigned(part):
                        name = target.attr
                        if _is_own(target) and not name.startswith("_") and (node.name, name) not in EXCEPT:
                            assert isinstance(part, ast.AnnAssign), f"{node.name}.{name} is not Final"
                            assert ast.unparse(part.annotation).startswith("Final"), f"{node.name}.{name} is not Final"
    assert classes == set(COMPLETE)


@pytest.mark.xdist_group("architecture")
def test_few_attributes_of_other_objects_are_assigned() -> None:
    rooms, constructed = Counter[str](), 0
    for name, file in FILES.items():
        for target, made in _with_objects_made(nodes(file)[0], frozenset()):
            if _is_own(target) or _is_count(target) or target.attr in LIBRARIES.get(name, ()):
                continue
            if isinstance(target.value, ast.Name) and target.value.id in made:
                constructed += 1
            else:
                rooms[name.rpartition("/")[0]] += 1
    assert rooms.total() <= OTHERS, rooms.most_common()
    assert constructed <= CONSTRUCTED


@pytest.mark.xdist_group("architecture")
def test_no_function_changes_variables_of_another() -> None:
    changed = {name for name, file in FILES.items() for node in nodes(file) if isinstance(node, ast.Nonlocal)}
    assert not changed, "make an object with this state, and a method that changes it"


def _with_objects_made(node: ast.AST, made: frozenset[str]) -> Iterator[tuple[ast.Attribute, frozenset[str]]]:
    """Yield the attributes that a tree assigns, each with the variables to which its function assigns new objects."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        made |= {
            target.id
            for part in ast.walk(node)
            if isinstance(part, ast.Assign | ast.AnnAssign) and _makes_object(part.value)
            for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
            if isinstance(target, ast.Name)
        }
    yield from ((target, made) for target in _assigned(node))
    for child in ast.iter_child_nodes(node):
        yield from _with_objects_made(child, made)


def _makes_object(value: ast.expr | None) -> bool:
    """Return True for a call of a class: of `cls`, or of a name with a capital letter."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name | ast.Attribute):
        return False
    name = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
    return name == "cls" or name.lstrip("_")[:1].isupper()


def _is_count(target: ast.Attribute) -> bool:
    owner = target.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in COUNTS


def _assigned(node: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that a statement assigns."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return [part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
