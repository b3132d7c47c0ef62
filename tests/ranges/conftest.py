"""Fixtures of all tests of copies by ranges."""

from __future__ import annotations

import pytest

from subscriber.settings import Settings
from tests.plugins.fix_subscriber import QUICK


@pytest.fixture
def settings() -> Settings:
    """Ranges of few rows."""
    return Settings(
        retry_interval=QUICK.retry_interval,
        empty_database_poll_interval=QUICK.empty_database_poll_interval,
        range_rows=25,
        range_duration=0.025,
    )
