"""docs/reference/python.md: the public names of `import subscriber`, from the docstrings, and other public modules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import subscriber
from subscriber import comparison, errors, repair, spark, testing
from subscriber.settings import Settings
from tools.docs import markdown, source
from tools.docs.markdown import code

HEAD = """
All functions and classes on this page are typed. Every `await` may be cancelled, and threads that a call starts end with it. Names
that are not on this page may change without notice. Errors have [a separate page](errors.md).
""".strip()

COMPARISON = "Rows that differ between both sides of a subscription. See [Compare both sides](../comparing.md)."
SPARK = "For their use see [Spark](../spark.md) and [the change log](../pipeline.md). They need the extra `spark`."

# heading -> introduction, names
GROUPS: dict[str, tuple[str, list[str]]] = {
    "A target": (
        "A program that runs subscriptions: [in an async program](../embedding.md), with [hooks](../hooks.md) and "
        "[functions that decide about conflicts](../conflicts.md#a-function-that-decides).",
        ["connect", "Database", "Dsn", "set_password_function", "PasswordRequest", "App", "Settings", "Subscription", "SubscriptionStatus", "Remedy", "Finding", "ConflictRecord",
         "Event", "StateChanged", "TableStateChanged", "WorkerFailed",
         "ConflictDetected", "LagCrossed", "Hook", "Hooks", "hooks_from", "Resolver", "Conflict"],
    ),
    "The change stream": (
        "[The change stream](../stream.md) without a target.",
        ["stream", "Stream", "Transaction", "Kind", "Change", "Insert", "Update", "Delete", "Truncate", "Message", "Row",
         "Relation", "Column", "Missing", "UNCHANGED", "NOT_SENT", "consume", "Consumer"],
    ),
    "Other databases": ("[Other databases](../other-databases.md) as target.", ["mirror", "apply_to", "Target"]),
    "Moves": (
        "[The move of a database](../cutover.md) to another server and back.",
        ["move_database", "Migration", "StartOptions", "MoveOptions", "MoveResult", "Rehearsal", "MigrationStatus", "Standing",
         "ServerStatus", "StepEvent", "Step", "RunningCommand", "MoveHook", "HookCall", "HookEvent"],
    ),
    "Positions": ("", ["Lsn"]),
}  # fmt: skip

FIELDS = Settings.names()

# Members that a class has for its own package. A dataclass's fields are all shown.
INTERNAL = {
    "Settings": set(FIELDS),  # they have a page of their own
    "Relation": {"plan", "by_name"},
    "Column": {"text"},
    "Row": {"relation"},
    "Hook": {"reads_values"},
    "Hooks": {"find", "target"},
    "Subscription": {"decides_conflicts"},
    "SubscriberError": {"hint", "command", "alternative", "amend", "locate"},  # on the page of errors; for the program
    "Remedy": {"steps", "map", "of", "from_json", "with_alternative"},
    "TableComparison": {
        *("add_changed", "add_unpaired", "count_rows", "estimate", "identify", "leave_buckets", "leave_out"),
        *("leave_unexplained", "restrict"),
    },
    "TableRepair": {"count_changes", "keep", "leave_out", "lock_out"},
    "Repair": {"read", "repeat"},
    "FakeTable": {"row"},
    "FakePublisher": {"types", "frames"},
    "FakeTransaction": {"publisher", "xid", "changes"},
}


def page() -> str:
    named = {name for _, names in GROUPS.values() for name in names}
    classes = {name for name in subscriber.__all__ if hasattr(errors, name)}
    assert named | classes == set(subscriber.__all__), f"add or remove: {(named | classes) ^ set(subscriber.__all__)}"
    parts = [HEAD]
    for heading, (introduction, names) in GROUPS.items():
        parts += [
            f"## {heading}",
            *filter(None, [introduction]),
            *(_entry(f"subscriber.{name}", getattr(subscriber, name)) for name in names),
        ]
    parts += ["## Comparison", COMPARISON]
    parts += [_entry(f"subscriber.comparison.{name}", getattr(comparison, name)) for name in comparison.__all__]
    parts += [_entry(f"subscriber.repair.{name}", getattr(repair, name)) for name in repair.__all__]
    parts += ["## Tests without a server", *_module(testing), "## Spark", SPARK]
    own = [name for name in spark.__all__ if name not in ("Comparison", "TableComparison")]
    parts += [_entry(f"subscriber.spark.{name}", getattr(spark, name)) for name in own]
    return markdown.page("Python", *parts)


def _entry(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        return _class(name, thing)
    if inspect.isfunction(thing):
        return _function(name, thing, "###")
    return f"### {name}\n\n{_value(thing)}"  # a value, or a name for several classes


def _value(thing: Any) -> str:
    if members := getattr(thing, "__args__", None):
        return f"Any of {', '.join(code(member.__name__) for member in members)}."
    return f"The member of [{type(thing).__name__}](#subscriber{type(thing).__name__.lower()}) of that name."


def _module(module: ModuleType) -> Iterator[str]:
    """Yield the public classes that the module's own source defines."""
    yield _prose(module.__doc__)
    for name, thing in vars(module).items():
        if inspect.isclass(thing) and thing.__module__ == module.__name__ and not name.startswith("_"):
            yield _class(f"{module.__name__}.{name}", thing)


def _class(name: str, thing: type) -> str:
    parts = [f"### {name}", _prose(inspect.getdoc(thing))]
    if fields := _fields(thing):
        parts.append("\n".join(f"- {field}" for field in fields))
    for member, value in _members(thing):
        if inspect.isfunction(value):
            parts.append(_function(member, value, "####", self_too=False))
        else:
            parts += [f"#### {member}", _prose(inspect.getdoc(value))]
    return "\n\n".join(filter(None, parts))


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Yield the class's own public methods and properties that have a docstring."""
    for member, attribute in vars(thing).items():
        value = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
        public = not member.startswith("_") and member not in INTERNAL.get(thing.__name__, ())
        described = isinstance(value, property) or inspect.isfunction(value) or hasattr(value, "attrname")
        if public and described and inspect.getdoc(value):
            yield member, value


def _fields(thing: type) -> list[str]:
    """Return the members of an enum, or the fields of a dataclass, with their end-of-line comments."""
    text = Path(inspect.getsourcefile(thing) or "").read_text()
    if dataclasses.is_dataclass(thing):
        comments = source.field_comments(text, thing.__name__)
        hidden = INTERNAL.get(thing.__name__, set[str]())
        fields = [
            field for field in dataclasses.fields(thing) if not field.name.startswith("_") and field.name not in hidden
        ]
        return [
            _described(f"{field.name}: {_type(field.type)}", comments.get(field.name) or _effect(field))
            for field in sorted(fields, key=lambda field: field.name not in thing.__annotations__)  # its own first
        ]
    members = getattr(thing, "__members__", {})
    return [_described(member, source.member_comments(text, thing.__name__).get(member, "")) for member in members]


def _effect(field: dataclasses.Field[Any]) -> str:
    """Return what the table of options says of a field of Subscription."""
    return field.metadata["option"].effect if "option" in field.metadata else ""


def _described(what: str, says: str) -> str:
    return f"{code(what)} – {says}" if says else code(what)


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _function(name: str, function: Any, level: str, *, self_too: bool = True) -> str:
    return (
        f"{level} {name}\n\n```text\n{_signature(name, function, self_too)}\n```\n\n{_prose(inspect.getdoc(function))}"
    )


def _signature(name: str, function: Any, self_too: bool) -> str:
    """Return the signature from the source, with its annotations and without the body."""
    written = ast.parse(inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(written, ast.FunctionDef | ast.AsyncFunctionDef)
    for arguments in (written.args.posonlyargs, written.args.args):
        if not self_too and arguments and arguments[0].arg in ("self", "cls"):
            del arguments[0]
    prefix = "async " if isinstance(written, ast.AsyncFunctionDef) else ""
    if any("asynccontextmanager" in ast.unparse(decorator) for decorator in written.decorator_list):
        prefix = "async with "
    parameters = re.split(r", (?![^\[(]*[\])])", ast.unparse(written.args))
    one_line = f"{prefix}{name}({', '.join(parameters)})"
    if written.returns is not None and not prefix.endswith("with "):
        one_line += f" -> {ast.unparse(written.returns)}"
    if len(one_line) <= 100:
        return one_line
    return (
        f"{prefix}{name}(\n"
        + "".join(f"    {parameter},\n" for parameter in parameters)
        + one_line[one_line.rindex(")") :]
    )


def _prose(doc: str | None) -> str:
    """Convert a docstring to Markdown. Aligned columns and indented text keep their layout."""
    paragraphs = re.split(r"\n\n+", inspect.cleandoc(doc or ""))
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    aligned = sum(bool(re.match(r"\S+  +\S", line)) for line in lines) > 1
    if aligned or lines[0].startswith((">>>", "    ")):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    return text
