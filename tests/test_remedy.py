"""The text of a remedy, its commands, and its JSON value."""

from __future__ import annotations

import pytest

from subscriber.remedy import Remedy

RESEED = Remedy("make a new slot", "subscriber reseed s")
ENABLE = Remedy(command="ALTER SUBSCRIPTION s ENABLE;")


@pytest.mark.parametrize(
    ("remedy", "text"),
    [
        (Remedy("wait for its end."), "Wait for its end."),
        (RESEED, "Make a new slot: subscriber reseed s"),
        (ENABLE, "ALTER SUBSCRIPTION s ENABLE;"),
        (Remedy("subscriber verify s names the rows."), "subscriber verify s names the rows."),
        (Remedy("raise the limit", alternative=RESEED), "Raise the limit. Or make a new slot: subscriber reseed s"),
        (ENABLE.with_alternative(RESEED), "ALTER SUBSCRIPTION s ENABLE; Or make a new slot: subscriber reseed s"),
        (RESEED.with_alternative(Remedy("wait.")), "Make a new slot: subscriber reseed s\nOr wait."),
        (Remedy("fix it.", then=ENABLE), "Fix it. Then: ALTER SUBSCRIPTION s ENABLE;"),
    ],
)
def test_the_text_is_made_of_advice_and_commands(remedy: Remedy, text: str) -> None:
    assert str(remedy) == text
    assert Remedy.from_json(remedy.as_json()) == remedy


def test_the_next_command_is_the_first_one() -> None:
    assert RESEED.with_alternative(ENABLE).commands == ("subscriber reseed s", "ALTER SUBSCRIPTION s ENABLE;")
    assert Remedy("wait.", alternative=RESEED).next_command == "subscriber reseed s"
    assert Remedy("wait.").next_command is None
    assert Remedy.of("") is None
