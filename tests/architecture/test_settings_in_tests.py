"""Tests pass settings to the code. They patch no constant of the package: see subscriber/settings.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent.parent

# Constants that tests patch, and why.
ALLOWED = {
    ("speedups/test_build.py", "SOURCE"): "the place of the C sources, which is no setting",
}

# Without one of these, a file patches nothing and is not parsed.
PATCH = re.compile(r"setattr|\.[A-Z_0-9]+\b[^\n]*=")


def _modules(tree: ast.AST) -> dict[str, str]:
    """Names that a module has by its imports, with what they stand for."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _patched_constants(text: str) -> Iterator[str]:
    """Names of upper-case attributes of the package that are set: by setattr(), or by an assignment."""
    if not PATCH.search(text):
        return
    tree = ast.parse(text)
    modules = _modules(tree)

    def is_ours(node: ast.expr) -> bool:
        return modules.get(ast.unparse(node), "").partition(".")[0] == "subscriber"

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [target, ast.Constant(value=str(name)), *_] if name.isupper() and is_ours(target):
                    yield name
                case [ast.Constant(value=str(path)), *_] if (
                    path.startswith("subscriber.") and path.rpartition(".")[2].isupper()
                ):
                    yield path
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr.isupper() and is_ours(target.value):
                    yield target.attr


def test_no_test_patches_a_constant() -> None:
    patched = set()
    for file in sorted(TESTS.rglob("*.py")):
        name = file.relative_to(TESTS).as_posix()
        patched |= {(name, constant) for constant in _patched_constants(file.read_text())}
    assert patched == ALLOWED.keys(), "pass Settings(...), or a plain value, in place of patching a constant"


def test_patches_are_found() -> None:
    text = (
        "from subscriber import retry\nimport subscriber.lsn\nfrom tests import plugins\n"
        "monkeypatch.setattr(retry, 'A_B', 1)\npatch.setattr(subscriber.lsn, 'C', 1)\nretry._D = 1\n"
        "monkeypatch.setattr('subscriber.lsn.E', 1)\n"
        "monkeypatch.setattr(retry, 'function', 1)\nmonkeypatch.setattr(plugins, 'F', 1)\n"
    )
    assert set(_patched_constants(text)) == {"A_B", "C", "_D", "subscriber.lsn.E"}
