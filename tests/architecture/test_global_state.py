"""No hidden global state: a function depends on its arguments, and on what a process has only once."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import FILES, nodes

# State of a task or of the process, and why it is no argument.
CONTEXT_VARIABLES = {
    "telemetry.py": "the keys of each log record of a task",
    "transaction_times.py": "measured_by() encloses a launcher that somebody else starts",
}
GLOBALS = {
    "telemetry.py": "the process has one log",
    "connection/password_function.py": "connections of libraries ask for passwords, too",
}


@pytest.mark.xdist_group("architecture")
def test_modules_with_state_of_a_task_or_of_the_process_have_a_reason() -> None:
    variables, globals_ = set(), set()
    for name, file in FILES.items():
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module == "contextvars":
                variables.add(name)
            if isinstance(node, ast.Import) and any(alias.name == "contextvars" for alias in node.names):
                variables.add(name)
            if isinstance(node, ast.Global):
                globals_.add(name)
    assert variables == set(CONTEXT_VARIABLES)
    assert globals_ == set(GLOBALS)
