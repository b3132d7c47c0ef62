"""Hooks for MkDocs: pages outside of docs/, and the links to them.

Documents, examples and benchmarks link to each other by their paths in the checkout, so that the links work in a
repository browser. The site has the same documents under other addresses, so each link is rewritten when its page is
read.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples"
PATHS = (*FOLDER.glob("*.py"), *(path for path in FOLDER.glob("shop/*.py") if path.stem != "__init__"))
EXAMPLES = sorted(path.relative_to(FOLDER).as_posix() for path in PATHS)

# Path in the checkout -> path on the site. Files of docs/ keep their names.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "licence.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples": "examples.md",
} | {f"examples/{name}": f"examples.md#{name.removesuffix('.py').replace('/', '-')}" for name in EXAMPLES}
ORIGINS = {page: origin for origin, page in ELSEWHERE.items() if "#" not in page}

# In a list, where MkDocs's Markdown has no fences.
NESTED = re.compile(r"^( +)```\w*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)#:\s]*)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in ORIGINS:
        files.append(File.generated(config, page, content=_content(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")
    markdown = NESTED.sub(lambda block: re.sub("^(?=.)", "    ", block[2], flags=re.MULTILINE), markdown)
    parts = CODE.split(markdown)
    parts[0::2] = [LINK.sub(lambda link: _mended(link, origin, here), part) for part in parts[0::2]]
    parts[1::2] = [part.replace("\\|", "|") for part in parts[1::2]]  # code in a table needs no escape here
    return "".join(parts)


def _content(page: str) -> str:
    if page == "examples.md":
        return "\n\n".join(["# Examples", *map(_example, EXAMPLES)])
    text = (ROOT / ORIGINS[page]).read_text()
    return f"# Licence\n\n{text}" if page == "licence.md" else text


def _example(name: str) -> str:
    text = (FOLDER / name).read_text()
    title = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return f"## {name.removesuffix('.py').replace('/', ' ')}\n\n{title}\n\n```python\n{text}```"


def _mended(link: re.Match[str], origin: str, here: str) -> str:
    """Return the site's address for a link of the checkout; other links are unchanged."""
    path, anchor = link[1], link[2] or ""
    if not path:
        return link[0]
    place = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    there = ELSEWHERE.get(place) or place.removeprefix("docs/")
    if not place.startswith("docs/") and place not in ELSEWHERE:
        return link[0]  # not on the site: MkDocs reports it
    return posixpath.relpath(there, posixpath.dirname(here) or ".") + ("" if "#" in there else anchor)
