"""The compiled part: built if possible, never used when stale, and never required."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from subscriber import _speedups

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module_from_spec = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_from_spec)
    return module_from_spec


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SUBSCRIBER_PURE", raising=False)
    without = shutil.ignore_patterns("*.so", "*.py", "__pycache__")
    return Path(shutil.copytree(_speedups.SOURCE, tmp_path / "_speedups", ignore=without))


def test_a_change_of_the_source_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_speedups, "SOURCE", source)
    if _speedups.module is not None:
        assert _speedups._load() == (_speedups.module, "")
        (source / "columns.c").write_text("")
        assert _speedups._load() == (None, "its source has changed since it was built")
        shutil.rmtree(source)  # a package without it cannot be changed
        assert _speedups._load() == (_speedups.module, "")


def test_the_compiled_part_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSCRIBER_PURE", "1")
    assert _speedups._load() == (None, "SUBSCRIBER_PURE is set")


def test_a_missing_extension_is_replaced_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBSCRIBER_PURE", raising=False)
    monkeypatch.setitem(sys.modules, "subscriber._speedups._native", None)
    assert _speedups._load() == (None, "it was not built")


@pytest.mark.parametrize(
    ("source_text", "variables", "reason"),
    [
        (None, {"LDSHARED": "no-such-compiler -shared"}, "no-such-compiler"),
        ("#include <no_such_header.h>\n", {}, "no_such_header.h"),
        (None, {"SUBSCRIBER_PURE": "1"}, "SUBSCRIBER_PURE is set"),
    ],
)
def test_a_build_that_fails_says_so_in_a_line_and_leaves_nothing(
    hook: ModuleType,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source_text: str | None,
    variables: dict[str, str],
    reason: str,
) -> None:
    if source_text is not None and _speedups.module is None:
        pytest.skip(f"there is no compiler to refuse it: {_speedups.why_not}")
    if source_text is not None:
        (source / "module.c").write_text(source_text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    old = source / ("_native" + hook.sysconfig.get_config_var("EXT_SUFFIX"))
    old.touch()
    assert hook.build(source) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "without its compiled part" in line
    assert reason in line
    assert {file.suffix for file in source.iterdir()} == {".c", ".h"}


@pytest.mark.skipif(_speedups.module is None, reason=f"not compiled here: {_speedups.why_not}")
def test_the_tests_of_twins_pass_without_the_extension() -> None:
    """The tests of functions that exist in C and in Python, as far as they need no server."""
    files = [
        *("tests/protocol", "--deselect=tests/protocol/test_stream_state.py"),
        *("tests/apply/test_batch.py", "tests/apply/test_binary_types.py", "tests/apply/test_table_hook.py"),
        "tests/change_stream/test_recordings.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=few", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"SUBSCRIBER_PURE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
