"""consumer.py is free of errors under pyright strict. `make lint` runs mypy strict on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_pyright_finds_nothing(tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed: pip install pyright")
    shutil.copy(ROOT / "tests/database/consumer.py", tmp_path)
    environment = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name, "extraPaths": [str(ROOT)]}
    configuration = {"include": ["consumer.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11", **environment}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    done = subprocess.run([pyright, "--project", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 errors" in done.stdout
