"""The browser that the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.browser import Chromium


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
