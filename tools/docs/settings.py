"""docs/reference/settings.md: the fields of `Settings`, with unit, default, variable and the reason for the default."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any, get_type_hints

from subscriber import settings
from subscriber.settings import Settings, kind_of
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
A setting is a limit, an interval or a time-out with a default that suits most systems. You can change it in three places; the
first one that names it counts:

| place | how |
|---|---|
| the command line | `subscriber run --setting status_interval=5s --setting spool_limit=20GB` |
| the environment | `SUBSCRIBER_STATUS_INTERVAL=5s` |
| a program | `subscriber.connect(target, settings=subscriber.Settings(status_interval=5))`, and the same for `stream()`, `consume()` and `mirror()` |

A program that passes no settings has those of the environment; one that passes `Settings(...)` is not changed by the environment.
`Settings.from_environment(status_interval=5)` combines both.

A time is a number with one of the units {times}, a size one with {sizes}. Without a unit it is in seconds or bytes. In Python a
time is a number of seconds, a size a number of bytes. A command ends with status 2, and Python raises an error, if there is no
such setting or if it cannot have the value.

Options of `CREATE SUBSCRIPTION` are not settings: they belong to one subscription, and [are stored with it](statements.md).
""".strip()

_HEADING = re.compile(r"^    # --- (.+?) -+$")


def page() -> str:
    """The page. Raises AssertionError for a field without documentation, or without a reason."""
    lines = inspect.getsource(settings).splitlines()
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    hints = get_type_hints(Settings, include_extras=True)
    parts, group, rows = [], "", list[list[str]]()
    for name, (line, text) in _documented().items():
        heading = next(found[1] for number in range(line, 0, -1) if (found := _HEADING.match(lines[number - 1])))
        if heading != group:
            group, rows = heading, []
            parts.append((heading, rows))
        kind, unit = kind_of(hints[name])
        says, _, reason = " ".join(text.split()).partition(" Reason: ")
        assert says, f"{name}: document the field"
        assert reason, f"{name}: give the reason for the default"
        shown = spell(fields[name].default, unit)
        rows.append([code(name), _described(kind, unit), shown, says, reason[0].upper() + reason[1:]])
    tables = [
        part
        for heading, rows in parts
        for part in (
            f"## {heading[0].upper()}{heading[1:]}",
            markdown.table(["setting", "value", "default", "meaning", "reason for the default"], rows),
        )
    ]
    head = HEAD.format(times=_units(settings.TIME_UNITS), sizes=_units(settings.MEMORY_UNITS))
    return markdown.page("Settings", head, *tables)


def _documented() -> dict[str, tuple[int, str]]:
    """Of each field: the line where it stands, and the text below it."""
    tree = ast.parse(inspect.getsource(settings))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    found = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[node.target.id] = node.lineno, str(below.value.value) if documented else ""  # type: ignore[union-attr]
    return found


def _units(multiples: Any) -> str:
    return ", ".join(code(unit) for unit in sorted(multiples, key=multiples.__getitem__))


def _described(kind: type, unit: settings.Unit) -> str:
    if unit.multiples is settings.TIME_UNITS:
        return "time" if unit.zero_excluded else "time or 0"
    if unit.multiples is settings.MEMORY_UNITS:
        return "size"
    if kind is bool:
        return "`on` or `off`"
    return {"int": "number", "Path": "directory", "DailyWindow": "two times of the day"}[kind.__name__]


def spell(value: object, unit: settings.Unit) -> str:
    """A default as it would be written on the command line, with the largest unit that leaves a whole number."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return code("on" if value else "off")
    if value and isinstance(value, int | float):
        for name, size in sorted(unit.multiples.items(), key=lambda item: -item[1]):
            number = round(value / size, 6)
            if number >= 1 and number == int(number):
                return code(f"{int(number)}{name}")
    return code(f"{value:g}" if isinstance(value, float) else str(value))
