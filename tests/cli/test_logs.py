from __future__ import annotations

import io
import json
import logging
import os
import re

import pytest

from subscriber import telemetry
from subscriber.cli.logs import LogFormat, configure
from subscriber.errors import ServerError, SlotLost
from subscriber.lsn import Lsn


def output(log_format: LogFormat) -> io.StringIO:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    return stream


def duplicate_key() -> ServerError:
    error = ServerError(
        {
            "C": "23505",
            "M": 'duplicate key value violates unique constraint "t_pkey"',
            "D": "Key (a)=(secret) already exists.",
            "W": 'COPY t, line 3, column a: "secret"',
        }
    )
    error.context.append('processing remote data for replication origin "pg_1" in transaction 739, finished at 0/15')
    return error


def test_postgres_lines_are_those_of_a_server() -> None:
    stream = output(LogFormat.POSTGRES)
    telemetry.log(telemetry.LOG, "first", detail="One.\nTwo.", hint="Do it.", context=["inner", "outer"])
    prefix = rf"\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d\d\d UTC \[{os.getpid()}\] "
    expected = ["LOG:  first", "DETAIL:  One.\n\tTwo.", "HINT:  Do it.", "CONTEXT:  inner\n\touter", ""]
    assert re.sub(f"(?m)^{prefix}", "", stream.getvalue()).split("\n") == "\n".join(expected).split("\n")


def test_json_has_the_keys_and_a_line_each() -> None:
    stream = output(LogFormat.JSON)
    with telemetry.bound(subscription="s", worker="apply"):
        telemetry.log(telemetry.WARNING, "über\nzwei", event="e", finish_lsn=Lsn(0x1_0000_00FF), worker="tablesync")
    telemetry.log(telemetry.LOG, "after")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "pid": os.getpid(),
        "message": "über\nzwei",
        "subscription": "s",
        "worker": "tablesync",
        "event": "e",
        "finish_lsn": "1/FF",
    }
    assert "subscription" not in second


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.RICH])
def test_row_values_are_not_logged(log_format: LogFormat) -> None:
    stream = output(log_format)
    telemetry.log_error(duplicate_key())
    telemetry.log(telemetry.LOG, "conflict", detail="Could not find the row.", exact_detail="Remote row (secret).")
    telemetry.log_error(ServerError({"C": "22P02", "M": 'invalid input syntax for type integer: "a secret" b"'}))
    where = "unnamed portal with parameters: $1 = 'secret'"
    telemetry.log_error(ServerError({"C": "22003", "M": "out of range", "W": where}))
    assert "secret" not in stream.getvalue()
    assert "t_pkey" in stream.getvalue()
    assert "finished at 0/15" in stream.getvalue()
    assert "Could not find the row." in stream.getvalue()


def test_only_the_postgres_format_has_the_values_postgresql_logs() -> None:
    stream = output(LogFormat.POSTGRES)
    telemetry.log_error(duplicate_key())
    telemetry.log(telemetry.LOG, "conflict", detail="Could not find the row.", exact_detail="Remote row (1).")
    assert "DETAIL:  Key (a)=(secret) already exists." in stream.getvalue()
    assert "DETAIL:  Remote row (1).\n" in stream.getvalue()


def test_an_error_comes_with_all_its_parts() -> None:
    stream = output(LogFormat.JSON)
    error = SlotLost('slot "s" is gone', detail="It was dropped.", hint="Create it.")
    telemetry.log_error(ExceptionGroup("tasks", [error, RuntimeError("boom")]), event="apply.failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["error_class"], first["sqlstate"], first["hint"]) == ("SlotLost", "42704", "Create it.")
    assert "traceback" not in first
    assert "RuntimeError: boom" in second["traceback"]
    assert second["event"] == "apply.failed"


def test_rich_is_plain_text_off_a_terminal() -> None:
    stream = output(LogFormat.RICH)
    telemetry.log(telemetry.LOG, "message [red]as it is[/]", hint="A hint.", subscription="s")
    assert re.sub(r"^\S+ ", "", stream.getvalue()) == "LOG     s: message [red]as it is[/]\n         HINT    A hint.\n"


def test_debug_is_off_until_asked_for() -> None:
    stream = output(LogFormat.POSTGRES)
    telemetry.log(telemetry.DEBUG, "unseen")
    configure(LogFormat.POSTGRES, level=telemetry.DEBUG, stream=stream)
    telemetry.log(telemetry.DEBUG, "seen")
    logging.getLogger("asyncio").warning("slow %s", "callback")
    lines = [line.split("] ")[1] for line in stream.getvalue().splitlines()]
    assert lines == ["DEBUG:  seen", "WARNING:  slow callback"]
