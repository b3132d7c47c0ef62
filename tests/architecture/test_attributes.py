"""Objects are complete when they are made: who assigns attributes of whom."""

from __future__ import annotations

import ast
from collections import Counter

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
# Assignments to attributes of other objects in the package. The number may only fall.
OTHERS = 413


@pytest.mark.xdist_group("architecture")
def test_sessions_are_complete_when_they_are_made() -> None:
    found = set()
    for file in FILES.values():
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and node.name in COMPLETE:
                found.add(node.name)
                for part in ast.walk(node):
                    for target in _assigned(part):
                        name = target.attr
                        if _is_own(target) and not name.startswith("_") and (node.name, name) not in EXCEPT:
                            assert isinstance(part, ast.AnnAssign), f"{node.name}.{name} is not Final"
                            assert ast.unparse(part.annotation).startswith("Final"), f"{node.name}.{name} is not Final"
    assert found == set(COMPLETE)


@pytest.mark.xdist_group("architecture")
def test_few_attributes_of_other_objects_are_assigned() -> None:
    rooms = Counter[str]()
    for name, file in FILES.items():
        for node in nodes(file):
            rooms[name.rpartition("/")[0]] += sum(not _is_own(target) for target in _assigned(node))
    assert rooms.total() <= OTHERS, rooms.most_common()


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
