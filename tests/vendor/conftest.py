"""Servers of Debian's PostgreSQL, skipped with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.debian import debian
from tests.matrix.programs import NotAvailable


@pytest.fixture(scope="session")
def vendor_bin() -> Path:
    """The programs of Debian's PostgreSQL 15."""
    try:
        return debian(15)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL 15 of Debian: {reason}")
