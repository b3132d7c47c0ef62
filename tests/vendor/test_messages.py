"""Messages in other languages. Our code depends on one text only, which has a parameter's number."""

from __future__ import annotations

from collections.abc import Iterator
from gettext import GNUTranslations
from pathlib import Path

import pytest

from subscriber.targets.postgres.session.error_context import _PARAMETER

TEXTS = ("unnamed portal parameter $%d", "unnamed portal parameter $%d = %s")


def catalogs(bin: Path) -> Iterator[tuple[str, GNUTranslations]]:
    """Yield the languages of the server and their messages."""
    root = bin.parent / "root" if (bin.parent / "root").exists() else Path("/")
    for file in sorted((root / "usr/share/locale").glob("*/LC_MESSAGES/postgres-15.mo")):
        with file.open("rb") as opened:
            yield file.parent.parent.name, GNUTranslations(opened)


def test_the_parameter_of_an_error_is_found_in_every_language(vendor_bin: Path) -> None:
    by_language = dict(catalogs(vendor_bin))
    if not by_language:
        pytest.skip("this installation has no translations")
    assert {"de", "es", "ko"} <= by_language.keys()
    for language, messages in by_language.items():
        for text in TEXTS:
            context = messages.gettext(text).replace("%d", "12").replace("%s", "'a = $1\n2'")
            number = _PARAMETER.fullmatch(context)
            assert number is not None, (language, context)
            assert number[1] == "12"


@pytest.mark.parametrize(
    "context",
    [
        "PL/pgSQL function f(integer) line 12 at RAISE",
        "PL/pgSQL function f$12() during function entry",
        'SQL function "f$12" statement 1',
    ],
)
def test_other_contexts_have_no_parameter(context: str) -> None:
    assert _PARAMETER.fullmatch(context) is None
