"""CONTRIBUTING.md names packages, files and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.test_floors import FLOORS

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_QUOTED = re.findall(r"`([\w./]+?)(?::(\w+))?`", TEXT)
PATHS = sorted({(path, name) for path, name in _QUOTED if "/" in path or path.endswith((".py", ".md"))})


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "table", [section("The packages"), (ROOT / "README.md").read_text().partition("\n## Map of the code\n")[2]]
)
def test_the_table_of_packages_has_every_floor_from_the_roof_down(table: str) -> None:
    lines = table.partition("\n\n[")[0].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    assert [set(re.findall(r"`(\w+)`", cell)) for cell in cells] == FLOORS


def test_each_folder_of_tests_is_that_of_a_package_or_is_named() -> None:
    packages = {init.parent.name for init in (ROOT / "subscriber").glob("*/__init__.py")}
    folders = {file.parent.name for file in (ROOT / "tests").glob("*/*.py")}
    text = section("Run tests")
    assert {name for name in folders - packages if f"`tests/{name}`" not in text} == set()
    assert {name for name in packages - folders if f"`{name}`" not in text} == set()


@pytest.mark.parametrize(("path", "name"), PATHS)
def test_a_file_and_a_name_in_it_exist(path: str, name: str) -> None:
    file = next((place for place in (ROOT / path, ROOT / "subscriber" / path) if place.exists()), None)
    assert file is not None, f"{path} is neither a file nor a folder"
    assert not name or re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", file.read_text(), re.MULTILINE)


@pytest.mark.parametrize("cell", re.findall(r"`settings\.py`: ((?:`\w+`(?:, )?)+)", TEXT))
def test_a_setting_exists(cell: str) -> None:
    settings = (ROOT / "subscriber/settings.py").read_text()
    for name in re.findall(r"`(\w+)`", cell):
        assert re.search(rf"^    {name}: ", settings, re.MULTILINE), name


def test_links_within_the_page_have_a_heading() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in TEXT.splitlines()}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings
