"""The distribution is `pgsubscriber`. No text may recommend installing `subscriber`, which is another project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import subscriber

ROOT = Path(__file__).parent.parent.parent
NAME = "pgsubscriber"

# Each pattern matches the name where a package manager or importlib.metadata reads it.
_NAME = r"subscriber(?![\w./-])"
OLD_WORDS = {
    "installed": rf"\b(?:install|add|download|require|--with|--from)\b[^\n|`]*?[ '\"]{_NAME}",
    "with extras": r"(?<![\w-])subscriber\[[a-z]",
    "queried": rf"\b(?:version|metadata|distribution|requires|files|get_distribution)\(\s*['\"]{_NAME}['\"]",
    "requirement": r"(?<![\w-])subscriber\s*(?:==|>=|~=)\s*\d",
    "project page": r"pypi\.org/(?:p|project)/subscriber\b",
}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the files of a checkout are not known without git")
    names = [name for name in listed.stdout.split("\0") if not name.endswith((".lock", ".hex"))]
    return [ROOT / name for name in names if (ROOT / name).is_file() and ROOT / name != Path(__file__)]


def old_words(text: str) -> list[str]:
    return [match[0] for pattern in OLD_WORDS.values() for match in re.finditer(pattern, text)]


@pytest.mark.parametrize(
    "line",
    [
        "pip install subscriber",
        "pip install 'subscriber[status]'",
        "$ pip install --upgrade 'subscriber'",
        "uv add subscriber",
        "pip install subscriber[sql]",
        "importlib.metadata.version('subscriber')",
        'requires("subscriber")',
        "subscriber==0.1.0",
        "https://pypi.org/project/subscriber/",
    ],
)
def test_old_words_are_found(line: str) -> None:
    assert old_words(line)
    assert not old_words(line.replace("subscriber", NAME))


def test_no_text_names_the_other_project() -> None:
    files = tracked()
    assert len(files) > 100
    words_by_file = {str(file.relative_to(ROOT)): old_words(file.read_text(errors="replace")) for file in files}
    assert {name: words for name, words in words_by_file.items() if words} == {}


def test_the_project_is_called_pgsubscriber_and_the_command_subscriber() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    assert project["scripts"] == {"subscriber": "subscriber.cli.main:main"}


def test_each_run_time_dependency_is_imported() -> None:
    """A package that only a file outside of `subscriber` reads is not installed for every user."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    text = "\n".join(file.read_text() for file in (ROOT / "subscriber").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, flags=re.MULTILINE))
    assert required - imported == set()


@pytest.mark.new_interpreter
def test_the_version_needs_no_installation() -> None:
    command = [sys.executable, "-m", "subscriber", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"subscriber {subscriber.__version__} (")
