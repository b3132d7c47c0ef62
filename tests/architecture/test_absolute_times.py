"""No absolute time decides a test: on a busy machine anything takes any time.

A test compares times with each other, or waits for a condition with a generous limit. To tell a wait for a timer from a
short one, it makes the timer longer than that limit. A lower bound holds on every machine and is permitted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "current_time"}


def is_reading(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CLOCKS


def is_measured(node: ast.expr) -> bool:
    """Return True for the difference of two readings of a clock."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and (is_reading(node.left))


def is_constant(node: ast.expr) -> bool:
    nodes_inside = [
        inside for inside in ast.walk(node) if isinstance(inside, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
    ]
    return all(isinstance(inside, ast.Name) and inside.id.isupper() for inside in nodes_inside)


def upper_bounds(function: ast.AST) -> Iterator[int]:
    """Yield the lines in which a measured time has to be less than a constant."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and is_measured(node.value)]
    times = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    for check in (node for node in ast.walk(function) if isinstance(node, ast.Assert)):
        for node in (node for node in ast.walk(check) if isinstance(node, ast.Compare)):
            less, more = node.left, node.comparators[0]
            if isinstance(node.ops[0], ast.Gt | ast.GtE):
                less, more = more, less
            if is_constant(more) and (is_measured(less) or (isinstance(less, ast.Name) and less.id in times)):
                yield node.lineno


def test_no_time_has_to_be_less_than_a_constant() -> None:
    results = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("test_*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in upper_bounds(function)
    ]
    assert results == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("assert monotonic() - began < 5", [1]),
        ("assert time.monotonic() - began <= 2 * LIMIT", [1]),
        ("assert 5 > anyio.current_time() - began", [1]),
        ("took = process_time() - began\nassert took < 0.5", [2]),
        ("assert monotonic() - began > 5", []),
        ("took = monotonic() - began\nassert took < 3 * other", []),
        ("assert monotonic() - began < 3 * seconds(action)", []),
    ],
)
def test_bounds_are_found(code: str, found: list[int]) -> None:
    assert list(upper_bounds(ast.parse(code))) == found
