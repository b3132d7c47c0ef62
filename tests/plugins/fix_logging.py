"""Commands configure the logging of their process, which is the test's own where a test calls one.

Without this, a later test of the process writes its records to a stream that pytest has closed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from subscriber import telemetry


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, last = logging.getLogger(), logging.lastResort
    assert last is not None
    handlers, level, own, formatter = root.handlers[:], root.level, telemetry.logger.level, last.formatter
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    telemetry.logger.setLevel(own)
    telemetry.follow_servers(None)
    last.setFormatter(formatter)
