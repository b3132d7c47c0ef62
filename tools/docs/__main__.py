"""Write the reference from the code and build the site into build/docs, as `make docs` does.

python -m tools.docs            write and build
python -m tools.docs --serve    the same, and serve it at http://127.0.0.1:8000 while you edit pages
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.commands.serve import serve
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tools.docs import reference

CONFIGURATION = str(reference.ROOT / "mkdocs.yml")


def build_site(folder: Path) -> None:
    """Build all pages into `folder`.

    Raises Abort, after printing them, for dead links and pages outside the navigation.
    """
    config = load_config(CONFIGURATION, strict=True, site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make docs", description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--serve", action="store_true", help="show it at http://127.0.0.1:8000 while pages are edited")
    reference.write()
    if parser.parse_args().serve:
        serve(CONFIGURATION)
        return
    folder = reference.ROOT / "build" / "docs"
    try:
        build_site(folder)
    except Abort as error:
        sys.exit(str(error))
    print(f"The site is in {folder / 'index.html'}")


if __name__ == "__main__":
    main()
