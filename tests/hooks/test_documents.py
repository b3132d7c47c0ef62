"""The programs in docs/hooks.md work as described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import subscriber
from subscriber import Hooks

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "hooks.md"


def test_the_programs_of_the_page_create_hooks() -> None:
    names: dict[str, Any] = {"subscriber": subscriber}
    targets = []
    for program in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(program.partition("async with")[0], names)
        assert isinstance(names["hooks"], Hooks)
        targets.append(names["hooks"].target("public", "person"))
    assert targets == [("staging", "people")] * 2
