"""The pages of docs/reference and the generator of each page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools import option_types
from tools.docs import api, catalog, commands, environment, errors, logs, man, settings, statements

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "reference"
MANUAL = ROOT / "man" / "subscriber.1"

PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "statements.md": statements.page,
    "errors.md": errors.page,
    "logs.md": logs.page,
    "environment.md": environment.page,
    "settings.md": settings.page,
    "catalog.md": catalog.page,
    "python.md": api.page,
}


def write() -> None:
    """Write all pages, and remove files that are not pages. Also write the manual page, and the module of typed options."""
    option_types.write()
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.iterdir():
        if file.name not in PAGES:
            file.unlink()
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
    MANUAL.parent.mkdir(exist_ok=True)
    MANUAL.write_text(man.page())
