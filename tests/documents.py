"""Tables in the documentation that a program has written, between two comments that name them."""

from __future__ import annotations

import re
from pathlib import Path


def write_section(document: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- end of NAME -->`. Raises ValueError if they are missing."""
    before = document.read_text()
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
    after, replaced = pattern.subn(lambda match: f"{match[1]}{text}\n{match[2]}", before)
    if replaced != 1:
        raise ValueError(f"{document} has {replaced} sections called {name}")
    document.write_text(after)
