"""The way of one row, as docs/how-it-works.md draws it: functions exist, and no file is entered three times."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^\|\s*\d+ \|.*\| `([\w/]+\.py):([\w.]+)` \|$", re.MULTILINE)


def defined(file: Path) -> set[str]:
    """Return the functions of a module, and its methods with their classes."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_the_walk_of_one_row() -> None:
    steps = STEP.findall((ROOT / "docs" / "how-it-works.md").read_text())
    assert len(steps) == 18
    for file, function in steps:
        assert function in defined(ROOT / "subscriber" / file)
    assert max(Counter(file for file, _ in steps).values()) <= 2
