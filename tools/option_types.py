"""subscriber/option_types.py: the options of statements as TypedDicts, from the table of options in subscription.py.

python -m tools.option_types     writes the file; tools.docs does the same
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from subscriber.subscription import OPTIONS, OptionStatement, OptionValue, ValueSyntax

FILE = Path(__file__).parent.parent / "subscriber" / "option_types.py"
HEAD = '''"""The options of typed statements, written by tools/option_types.py from subscription.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict
'''
CLASSES = {
    "CreateOptionValues": (OptionStatement.CREATE, "The options of Database.create_subscription()."),
    "AlterOptionValues": (OptionStatement.SET, "The options of Database.alter()."),
}
TYPES = {
    ValueSyntax.BOOLEAN: "bool",
    ValueSyntax.OWNERSHIP: "str",
    ValueSyntax.NUMBER: "int",
    ValueSyntax.MILLISECONDS: "int",
    ValueSyntax.SLOT_NAME: "str | None",
    ValueSyntax.SYNCHRONOUS_COMMIT: 'Literal["off", "local", "remote_write", "remote_apply", "on"]',
    ValueSyntax.STREAMING: 'bool | Literal["off", "on", "parallel"]',
    ValueSyntax.ORIGIN: 'Literal["any", "none"]',
    ValueSyntax.COPY_DATA: 'bool | Literal["compare"]',
    ValueSyntax.CONFLICT_POLICY: "str",
    ValueSyntax.ROLES: "Sequence[str]",
    ValueSyntax.DURATION: "int | str",
    ValueSyntax.SEQUENCES: "Sequence[tuple[str, str]]",
}


def _words(choices: Iterable[str]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


def _annotation(value: OptionValue) -> str:
    if value.choices is not None:
        return f"Literal[{_words(value.choices)}]"
    return TYPES.get(value.syntax, "str")


def module() -> str:
    """Return the text of the module."""
    parts = [HEAD]
    for name, (statement, doc) in CLASSES.items():
        fields = [
            f"    {option}: {_annotation(row.value)}" for option, row in OPTIONS.items() if statement in row.statements
        ]
        parts.append("\n".join([f"class {name}(TypedDict, total=False):", f'    """{doc}"""', "", *fields]) + "\n")
    return "\n\n".join(parts)


def write() -> None:
    """Write the module, if it has changed."""
    if not FILE.exists() or FILE.read_text() != module():
        FILE.write_text(module())


if __name__ == "__main__":
    write()
