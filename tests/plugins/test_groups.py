"""Whether tests with the same expensive fixture run in one process."""

from __future__ import annotations

import pytest


@pytest.fixture
def grouped() -> None:
    """Has a group in conftest.py."""


def test_groups_are_in_force(request: pytest.FixtureRequest, grouped: None) -> None:
    """pytest-xdist writes the group into the name of a test. Under a pytest that it does not know, it does nothing."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@groups")
