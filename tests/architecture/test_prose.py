"""How often each room's docstrings, comments and Markdown contain the constructions that tools/prose.py names."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import FILES, each_file, nodes
from tools.prose import ROOT, Tally, files_of, long_sentences, measure, occurrences, passages

pytestmark = pytest.mark.xdist_group("prose")  # each process would measure all files

# Per 1,000 words. Five libraries that are known for their documentation stay below 2 constructions.
CONSTRUCTIONS = 3.0
LONG_SENTENCES = 3.0


def rooms() -> dict[str, list[Path]]:
    """The files of each room: a folder of the package, its other files, and what is not part of the package."""
    package = ROOT / "subscriber"
    files_by_room = {str(room.relative_to(ROOT)): files_of(room) for room in package.iterdir() if room.is_dir()}
    files_by_room["subscriber"] = sorted(package.glob("*.py"))
    for name in ("benchmarks", "docs", "examples", "migrations", "tests", "tools"):
        files_by_room[name] = files_of(ROOT / name)
    files_by_room |= {path.name: [path] for path in ROOT.glob("*.md")}
    return {room: files for room, files in files_by_room.items() if files}


@cache
def tally_of(room: str) -> Tally:
    return measure(rooms()[room])


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_stays_below_the_limit(room: str) -> None:
    tally = tally_of(room)
    assert tally.rate <= CONSTRUCTIONS, f"python -m tools.prose {room}; {tally.found}"


def test_long_sentences_are_rare() -> None:
    total = Tally()
    for room in rooms():
        total.add(tally_of(room))
    assert total.rate_of_long_sentences <= LONG_SENTENCES


# A first word that hides what a function does, or what a class is.
OPENINGS = {"Whether", "Of", "Those", "What", "As", "Where", "How", "For", "In", "That", "Which"}


@each_file()
def test_docstrings_begin_with_a_verb_or_a_noun(name: str) -> None:
    openings = []
    for node in nodes(FILES[name]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first, _, rest = (ast.get_docstring(node) or "").partition(" ")
            if first in OPENINGS:
                openings.append(f"{node.name}: {first} {rest.splitlines()[0] if rest else ''}")
    assert not openings, openings


def found_in(file: Path) -> list[tuple[int, str]]:
    return [(line, words) for passage in passages(file) for line, _, words in occurrences(passage)]


def test_docstrings_and_comments_are_read_and_code_is_not(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Whoever reads.\n\nWhat is `what was` once."""\n\nx = "whatever"  # of them\ny = 1  # anew,\n# as was told\n'
    )
    assert sorted(found_in(file)) == [(1, "Whoever"), (3, "What is"), (5, "of them"), (6, "anew"), (7, "told")]


def test_code_in_markdown_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("It comes.\n\n```sh\n# whoever\n```\n\nThe flag `--look` is of use.\n\nMend it.\n")
    assert sorted(found_in(file)) == [(1, "comes"), (9, "Mend")]


def test_a_list_item_and_a_table_cell_are_sentences_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    words = "word " * 20
    file.write_text(f"{words}\n- {words}\n- {words}\n\n| {words} | {words} |\n")
    (passage,) = passages(file)
    assert list(long_sentences(passage)) == []
    file.write_text(words + words)
    (passage,) = passages(file)
    assert len(list(long_sentences(passage))) == 1
