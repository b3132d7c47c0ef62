"""The output of help(): every public name has a docstring, which names its options."""

from __future__ import annotations

import inspect
import re

import pytest

import subscriber
from subscriber import testing

PUBLIC = [
    *(getattr(subscriber, name) for name in ("Consumer", "Stream", "Transaction", "Row", "Relation", "Column", "Kind")),
    *(getattr(subscriber, name) for name in ("Insert", "Update", "Delete", "Truncate", "Message", "Missing")),
    testing.FakePublisher,
    testing.FakeTable,
    testing.FakeTransaction,
]
FROM_MAPPING = {"get", "items", "keys", "values"}  # documented where they are inherited from


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_method_says_what_it_does(kind: type) -> None:
    assert kind.__doc__
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or name in FROM_MAPPING or not (callable(member) or isinstance(member, property)):
            continue
        if member.__doc__ is None:
            assert name in UNSAID, f"{kind.__name__}.{name}"


# Names of a fake that its protocols require, and that need no description.
UNSAID = {"close", "start", "types", "truncate"}


@pytest.mark.parametrize("function", [subscriber.stream, subscriber.consume], ids=lambda function: function.__name__)
def test_every_option_is_explained(function: object) -> None:
    explained = (inspect.getdoc(subscriber.stream) or "") + (inspect.getdoc(function) or "")
    for name in inspect.signature(function).parameters:  # type: ignore[arg-type]
        assert re.search(rf"`{name}\b|^ +{name}: ", explained, re.MULTILINE), name


def test_help_of_stream_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    help(subscriber.stream)
    assert "spool_limit" in capsys.readouterr().out
