"""Tokens, sessions and attempts, without a server."""

from __future__ import annotations

import pytest

from subscriber.console.access import (
    ATTEMPTS,
    ATTEMPTS_WINDOW,
    IDLE_LIMIT,
    MOST_ADDRESSES,
    MOST_SESSIONS,
    SESSION_LIMIT,
    AttemptLimit,
    Sessions,
    Tokens,
)
from subscriber.console.action import ConsoleAction
from subscriber.errors import ConninfoError

TOKEN = "abcdefghijklmnopqrstuvwxyz-01234"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_identifies_its_person() -> None:
    tokens = Tokens.parse(f"# comment\n\nada:{TOKEN}\n bob:{TOKEN * 2}\n", "file")
    assert [tokens.find(token) for token in (TOKEN, TOKEN * 2, TOKEN[:-1], TOKEN + "t", "", "\ud800")] == [
        "ada",
        "bob",
        *[None] * 4,
    ]
    assert TOKEN not in repr(tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file has no token"),
        ("# only\n", "file has no token"),
        (TOKEN, "line 1 of file is not LABEL:TOKEN"),
        (f"a b:{TOKEN}", "line 1 of file is not LABEL:TOKEN"),
        (f"ada:{TOKEN}\nbob:{TOKEN} x", "line 2 of file is not LABEL:TOKEN"),
        (f"ada:{'abcdefghi' * 4}", "the token in line 1 of file is not random"),
        (f"ada:{TOKEN[:-1]}", "the token in line 1 of file is shorter than 32 characters"),
    ],
)
def test_an_invalid_file_of_tokens_is_refused_without_showing_them(text: str, message: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        Tokens.parse(text, "file")
    assert caught.value.message == message
    assert TOKEN[:-1] not in str(caught.value) + str(caught.value.hint)


def test_attempts_of_an_address_are_limited() -> None:
    clock = Clock()
    limit = AttemptLimit(clock)
    for _ in range(ATTEMPTS):
        assert limit.wait("10.0.0.1") == 0
        limit.fail("10.0.0.1")
    assert limit.wait("10.0.0.1") == limit.wait("::ffff:10.0.0.1") == ATTEMPTS_WINDOW
    assert limit.wait("10.0.0.2") == 0
    clock.now += ATTEMPTS_WINDOW
    assert limit.wait("10.0.0.1") == 0
    limit.fail("10.0.0.1")  # the next window begins with the second failure
    assert limit.wait("10.0.0.1") == 0
    for number in range(ATTEMPTS):
        limit.fail(f"2001:db8::{number:x}")  # one client has a network
    assert limit.wait("2001:db8::ffff") > 0
    for number in range(MOST_ADDRESSES + 10):
        limit.fail(f"name{number}")
    assert len(limit._failures) == MOST_ADDRESSES


def test_sessions_end_after_idle_time_and_at_their_limit() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    key = sessions.open("ada")
    assert (sessions.use(key), sessions.use(key[:-1]), sessions.use("")) == ("ada", None, None)
    clock.now += IDLE_LIMIT - 1
    assert sessions.use(key) == "ada"
    clock.now += IDLE_LIMIT
    assert sessions.use(key) is None
    key = sessions.open("ada")
    sessions.close(key)
    assert sessions.use(key) is None
    key, passed = sessions.open("ada"), 0.0
    while passed < SESSION_LIMIT:
        assert sessions.use(key) == "ada"
        passed += IDLE_LIMIT / 2
        clock.now += IDLE_LIMIT / 2
    assert sessions.use(key) is None
    keys = [sessions.open("ada") for _ in range(MOST_SESSIONS + 1)]
    assert [sessions.use(key) for key in (keys[0], keys[1])] == [None, "ada"]
    assert Sessions(clock).use(keys[1]) is None  # after a restart


def test_statements_of_actions() -> None:
    name = 'a"; DROP'
    assert ConsoleAction.parse({"action": "disable", "subscription": name}).statement == (
        'ALTER SUBSCRIPTION "a""; DROP" DISABLE'
    )
    skip = ConsoleAction.parse({"action": "skip", "subscription": "s", "lsn": "0/1a"})
    assert (skip.statement, skip.arguments) == ("ALTER SUBSCRIPTION \"s\" SKIP (lsn = '0/1A')", {"lsn": "0/1A"})
    assert (
        ConsoleAction.parse({"action": "retry", "subscription": "s"}).statement
        == 'ALTER SUBSCRIPTION "s" QUARANTINE RETRY'
    )


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"action": "drop", "subscription": "s"},
        {"action": ["enable"], "subscription": "s"},
        {"action": "enable"},
        {"action": "enable", "subscription": ""},
        {"action": "enable", "subscription": ["s"]},
        {"action": "enable", "subscription": "s", "lsn": "0/1"},
        {"action": "skip", "subscription": "s"},
        {"action": "skip", "subscription": "s", "lsn": "0/1'); DROP SUBSCRIPTION s; --"},
        {"action": "skip", "subscription": "s", "lsn": 7},
        {"action": "verify", "subscription": "s", "tables": ["public.t"]},
        {"action": "repair", "subscription": "s", "tables": [1]},
        {"action": "repair", "subscription": "s", "tables": ["t"] * 1001},
        {"action": "enable", "subscription": "s", "sql": "DROP SUBSCRIPTION s"},
    ],
)
def test_other_documents_are_no_actions(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        ConsoleAction.parse(document)
