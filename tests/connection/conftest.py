"""A server with TLS."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.matrix.debian import debian
from tests.matrix.programs import NotAvailable


@pytest.fixture(scope="package")
def tls_bin() -> Path:
    """The programs of a server with TLS. Those of the wheel are built without it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian: apt-get install openssl)")
    try:
        return debian(15)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL with TLS: {reason}")
