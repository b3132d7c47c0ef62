"""The programs of users are free of errors under pyright strict. `make lint` runs mypy strict on them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cache import cache_directory, fill
from tests.matrix.programs import NotAvailable, fetch_package

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "tests/database/consumer.py": 1,
    "examples/web_app.py": 1,
    "examples/shop": 4,
    "examples/litestar_app.py": 1,
}
PYRIGHT, PYRIGHT_SHA512 = (
    "pyright@1.1.414",
    "FPZZb51jepDX4eP7TEYDeNFtmE3WgwkkEcJpvH3/QmUSsj0EAy3LXu+xB4T/FWDejtsXlCfFr/rbWFjwuwuXww==",
)


@pytest.fixture(scope="module")
def pyright() -> list[str]:
    """The command. npm fetches the program, and Node runs it."""
    try:
        place = fill(cache_directory("pyright") / PYRIGHT, partial(fetch_package, PYRIGHT, PYRIGHT_SHA512))
    except NotAvailable as error:
        pytest.skip(str(error))
    return [shutil.which("node") or "node", str(place / "package" / "index.js")]


# The program with every entry point, and one of a framework, which takes 4 s. The others take another 13 s, for their
# frameworks.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "programs", [list(PROGRAMS)[:2], pytest.param(list(PROGRAMS)[2:], marks=pytest.mark.soak)], ids=["few", "others"]
)
def test_pyright_finds_nothing(tmp_path: Path, pyright: list[str], programs: list[str]) -> None:
    environment = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name, "extraPaths": [str(ROOT)]}
    for program in programs:  # pyright reads no file outside of its project
        place = tmp_path / program
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / program).is_dir() else shutil.copy)(ROOT / program, place)
    configuration = {"include": programs, "typeCheckingMode": "strict", "pythonVersion": "3.11", **environment}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [*pyright, "--outputjson", "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    document = json.loads(done.stdout)
    problems = [(Path(problem["file"]).name, problem["message"]) for problem in document["generalDiagnostics"]]
    assert problems == []
    assert document["summary"]["filesAnalyzed"] == sum(PROGRAMS[program] for program in programs)
