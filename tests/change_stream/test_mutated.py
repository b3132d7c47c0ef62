"""Damaged streams: compiled and Python functions have the same result, and raise only documented errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from subscriber import _speedups

SEED = int(os.environ.get("SUBSCRIBER_MUTATION_SEED", "1"))


def outcomes(count: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.change_stream.mutated", str(SEED), str(count)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(_speedups.module is None, reason=f"nothing to compare: {_speedups.why_not}")
@pytest.mark.parametrize("count", [300, pytest.param(60_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_damaged_messages_have_the_same_result_in_c_and_in_python(count: int) -> None:
    """A failure's line is the number of its stream for SUBSCRIBER_MUTATION_SEED."""
    with outcomes(count) as compiled, outcomes(count, SUBSCRIBER_PURE="1") as pure:
        assert compiled.stdout is not None
        assert pure.stdout is not None
        seen = 0
        for number, (of_compiled, other) in enumerate(zip(compiled.stdout, pure.stdout, strict=True)):
            assert of_compiled == other, number
            assert "UNDOCUMENTED" not in of_compiled, (number, of_compiled)
            seen += "Error" in of_compiled
    assert (compiled.returncode, pure.returncode) == (0, 0)
    assert seen > count // 3
