"""Settings: their values as text, in the environment and on the command line."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import typer

from subscriber.cli.setting_option import read_settings
from subscriber.settings import Settings, parse_assignments, variable_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("status_interval=500ms", 0.5),
        ("status_interval=10", 10.0),
        ("status_interval = 1.5 min", 90.0),
        ("takeover_after=2h", 7200.0),
        ("retry_interval=0", 0.0),
        ("first_retry_delay=500us", 0.0005),
        ("receive_queue_size=64MB", 64 * 1024**2),
        ("receive_queue_size=0.5kB", 512),
        ("receive_queue_size=100", 100),
        ("max_sync_workers=4", 4),
        ("one_by_one=on", True),
        ("one_by_one=FALSE", False),
        ("spool_dir=/a=b", Path("/a=b")),
    ],
)
def test_values_as_text(text: str, expected: object) -> None:
    (value,) = parse_assignments([text]).values()
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("status_intervall=1", 'unrecognized setting "status_intervall". Perhaps you meant "status_interval".'),
        ("status_interval", '"status_interval" must have the form NAME=VALUE'),
        ("status_interval=soon", "a number is required; valid units are s, us, ms, min, h, d"),
        ("status_interval=10S", 'invalid value for setting "status_interval": "10S"; valid units are s, us, ms, '),
        ("status_interval=0", 'setting "status_interval" is 0, and must be greater than 0 seconds'),
        ("status_interval=-1", "a number is required"),
        ("status_interval=", "a number is required"),
        ("receive_queue_size=1mb", "valid units are B, kB, MB, GB, TB"),
        ("archive_queue_size=0", "must be at least 1 bytes"),
        ("receive_queue_size=0.3", "a whole number is required"),
        ("max_sync_workers=0", "must be at least 1"),
        ("max_sync_workers=2s", "the setting has no unit"),
        ("one_by_one=maybe", "valid values are on, true, yes, 1, off, false, no, 0"),
    ],
)
def test_wrong_names_and_values(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the text is compared below
        parse_assignments([text])
    assert expected in str(raised.value)


def test_an_unknown_name_is_answered_with_all_that_exist() -> None:
    with pytest.raises(ValueError, match="unrecognized setting") as raised:
        parse_assignments(["x=1"])
    assert all(name in str(raised.value) for name in Settings.names())


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"status_interval": "1s"}, TypeError),
        ({"status_interval": True}, TypeError),
        ({"status_interval": None}, TypeError),
        ({"max_sync_workers": 1.5}, TypeError),
        ({"spool_dir": "/tmp"}, TypeError),
        ({"no_setting": 1}, TypeError),
        ({"status_interval": 0}, ValueError),
        ({"status_interval": float("inf")}, ValueError),
        ({"retry_interval": -1}, ValueError),
    ],
)
def test_values_of_a_program_are_checked(values: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Settings(**values)


def test_an_object_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().status_interval = 1  # type: ignore[misc]


def test_every_default_is_a_value_of_its_setting() -> None:
    for name in Settings.names():
        default = getattr(Settings(), name)
        assert Settings(**{name: default}) == Settings()


def test_settings_are_read_from_the_environment() -> None:
    environment = {
        "SUBSCRIBER_STATUS_INTERVAL": "3s",
        "SUBSCRIBER_SPOOL_DIR": "/spool",
        "SUBSCRIBER_ONE_BY_ONE": "1",
        "SUBSCRIBER_RETRY_INTERVAL": "",
        "SUBSCRIBER_PORT": "tcp://10.0.0.1:5432",  # of a service of that name, in Kubernetes
        "SUBSCRIBER_TARGET_DSN": "host=x",
    }
    assert Settings.from_environment(environment, max_sync_workers=5) == Settings(
        status_interval=3, spool_dir=Path("/spool"), one_by_one=True, max_sync_workers=5
    )
    assert Settings.from_environment(environment, status_interval=4).status_interval == 4
    assert Settings.from_environment({}) == Settings()
    with pytest.raises(ValueError, match='environment variable SUBSCRIBER_SPOOL_LIMIT: invalid value for setting "sp'):
        Settings.from_environment({"SUBSCRIBER_SPOOL_LIMIT": "much"})


def test_the_command_line_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_of("status_interval"), "3s")
    monkeypatch.setenv(variable_of("receiver_timeout"), "30s")
    monkeypatch.delenv(variable_of("spool_dir"), raising=False)
    settings = read_settings(["status_interval=4s", "spool_limit=1GB"], spool_limit=5, spool_dir=None)
    assert settings == Settings(status_interval=4, receiver_timeout=30, spool_limit=5)
    with pytest.raises(typer.BadParameter, match="unrecognized setting"):
        read_settings(["nothing=1"])
