"""The documents of the checkout, and their examples."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        ROOT / "benchmarks/README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_END = "|&;<>()\n"  # characters that end a call


def blocks(document: Path, language: str) -> list[str]:
    """Return the examples of a document in a language, in document order."""
    found = _BLOCK.findall((ROOT / document).read_text())
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def all_blocks(language: str) -> list[tuple[Path, str]]:
    return [(document, block) for document in DOCUMENTS for block in blocks(document, language)]


def prose(document: Path) -> str:
    """Return the text of a document without its examples."""
    return _BLOCK.sub("", (ROOT / document).read_text())


def commands(shell: str, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of `program`, a regular expression, in lines of a shell."""
    shell = re.sub(r"\\\n", " ", re.sub(r"(^|\s)#.*", r"\1", shell))
    shell = re.sub(r"\s[0-9]>", " >", shell)  # the 2 of 2> is not an argument
    for call in re.finditer(rf"(?:^|[|;&(]|[\w]=\S+)\s*(?:{program})(?= |$)", shell, re.MULTILINE):
        lexer = shlex.shlex(shell[call.end() :], posix=True, punctuation_chars=_END)
        lexer.whitespace, lexer.whitespace_split = " \t", True
        arguments: list[str] = []
        for token in lexer:
            if token and set(token) <= set(_END):
                break
            arguments.append(token)
        yield arguments
