"""Nothing global but the plugins; a fixture lives with what it is about."""

from __future__ import annotations

pytest_plugins = [
    "tests.plugins.fix_cluster",
    "tests.plugins.fix_hostile",
    "tests.plugins.fix_proxy",
    "tests.plugins.fix_subscriber",
]
