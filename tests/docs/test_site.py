"""The site builds without dead links and orphan pages, and its reference matches the code."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from mkdocs.exceptions import Abort

from tools import option_types
from tools.docs import __main__ as site
from tools.docs import commands, man, reference
from tools.docs.pages import EXAMPLES, ROOT


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    written = reference.FOLDER / name
    assert written.exists(), "run: make docs"
    assert written.read_text() == reference.PAGES[name](), f"docs/reference/{name} is out of date; run: make docs"


def test_the_typed_options_are_those_of_the_table() -> None:
    assert option_types.FILE.read_text() == option_types.module(), "subscriber/option_types.py is out of date"


def test_the_reference_has_no_other_pages() -> None:
    assert {file.name for file in reference.FOLDER.iterdir()} == set(reference.PAGES)


def test_the_manual_page_is_what_the_code_says() -> None:
    assert reference.MANUAL.read_text() == man.page(), "man/subscriber.1 is out of date; run: make docs"
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert configuration["wheel"]["shared-data"] == {"man/subscriber.1": "share/man/man1/subscriber.1"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed (Debian: apt-get install groff)")
def test_the_manual_page_is_formatted_without_a_warning() -> None:
    command = ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", "-ww", str(reference.MANUAL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for name in commands.commands():
        assert f"   subscriber {name} [OPTIONS]" in done.stdout.replace("\N{MINUS SIGN}", "-")


def test_every_page_and_every_link_is_there(tmp_path: Path) -> None:
    site.build_site(tmp_path)
    home = (tmp_path / "index.html").read_text()
    for address in ("operations/", "examples/#masking", "changelog/", "benchmarks/", "reference/commands/"):
        assert f'href="{address}"' in home
    for page in tmp_path.rglob("*.html"):  # fences and tables that were not understood as such
        text = page.read_text()
        assert "```" not in text, page
        assert "<p>|" not in text, page
    for name in EXAMPLES:
        assert (
            f'id="{name.removesuffix(".py").replace("/", "-")}"' in (tmp_path / "examples" / "index.html").read_text()
        )


@pytest.mark.parametrize("link", ["nowhere.md", "operations.md#nowhere", "../nowhere.md"])
def test_a_dead_link_is_an_error(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "operations.md").write_text(f"# Operations\n\n[This]({link}) is not there.\n")
    (tmp_path / "mkdocs.yml").write_text(
        (ROOT / "mkdocs.yml").read_text().partition("nav:\n")[0].replace("hooks:", "#")
    )
    monkeypatch.setattr(site, "CONFIGURATION", str(tmp_path / "mkdocs.yml"))
    monkeypatch.setattr(logging.getLogger("mkdocs"), "propagate", False)
    with pytest.raises(Abort):
        site.build_site(tmp_path / "site")
