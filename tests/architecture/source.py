"""The package's files, each read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "subscriber"
FILES = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def text(file: Path) -> str:
    return file.read_text()


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return the file's syntax tree in the order of ast.walk(), the module first. Do not change it."""
    return tuple(ast.walk(ast.parse(text(file))))


def each_file(*, but: tuple[str, ...] = ()) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make a test of a check: it runs for the name of each file in FILES, except those of `but`.

    A test for each file and check is 6,000 tests, which take a minute of a processor, most of it in pytest.
    """

    def make(check: Callable[[str], None]) -> Callable[[], None]:
        @pytest.mark.xdist_group("architecture")  # each process would parse all files
        def test() -> None:
            errors = []
            for name in FILES:
                if name not in but:
                    try:
                        check(name)
                    except AssertionError as error:
                        error.add_note(f"in {name}")
                        errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(FILES)} files", errors)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return make
