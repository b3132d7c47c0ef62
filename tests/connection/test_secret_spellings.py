"""No spelling of a connection string makes an output show its password: hundreds of random ones, in ten outputs each.

A password is a random core between random characters. The outputs must not have the core.
"""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from subscriber import telemetry
from subscriber.catalog.grammar.parser import parse
from subscriber.cli.arguments import hidden
from subscriber.cli.logs import JsonFormatter, PostgresFormatter
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import resolve_dsn
from subscriber.errors import ServerError, SubscriberError

LETTERS = "bcdfghjkmnpqrtvwxz"  # no vowels, so that a core is no word of a message
AROUND = [
    "",
    "",
    "",
    "@",
    ":",
    "/",
    "?",
    "#",
    "%",
    "&",
    "=",
    " ",
    "'",
    '"',
    "\\",
    ";",
    ",",
    "+",
    "$",
    "ü",
    "!",
    "..",
    "]",
]
SCHEMES = [
    "postgresql",
    "postgres",
    "postgresql+asyncpg",
    "postgresql+psycopg",
    "postgres+pg8000",
    "PostgreSQL",
    "pgsql",
]
KEYS = ["password", "password ", "PASSWORD", "sslpassword", "pasword", "passwd", "pass", "pwd"]


def cores(number: random.Random) -> str:
    return "".join(number.choices(LETTERS, k=12))


def spelling(number: random.Random) -> tuple[str, str]:
    """Return a connection string, valid or not, and the core of its password."""
    core = cores(number)
    password = number.choice(AROUND) + number.choice(AROUND) + core + number.choice(AROUND) + number.choice(AROUND)
    host = number.choice(["127.0.0.1", "[::1]", "a.invalid,b.invalid", "", "/tmp"])
    port = number.choice(["", ":1", ":x"])
    match number.randrange(5):
        case 0 | 1:
            written = quote(password, safe="") if number.random() < 0.6 else unencoded(password)
            query = number.choice(["", "?sslmode=disable", "?connect_timeout=x", "?colour=red", f"?password={written}"])
            return f"{number.choice(SCHEMES)}://me:{written}@{host}{port}/shop{query}", core
        case 2:
            written = quote(password, safe="") if number.random() < 0.6 else unencoded(password)
            return f"{number.choice(SCHEMES)}://{host}{port}/shop?user=me&password={written}", core
        case _:
            escaped = password.replace("\\", "\\\\").replace("'", "\\'")
            value = number.choice([f"'{escaped}'", f"'{escaped}", escaped, password])
            pairs = [
                "host=127.0.0.1",
                "port=1",
                "user=me",
                f"{number.choice(KEYS)}={value}",
                "dbname=shop",
                "colour=red",
            ]
            chosen = [pair for pair in pairs if core in pair or number.random() < 0.7]
            return " ".join(chosen), core


def unencoded(password: str) -> str:
    """Return what a user forgets to encode. A URI with other characters has another meaning for SQLAlchemy."""
    return "".join(character for character in password if character not in " ?#&").lstrip("@,")


def fails(function: object, *arguments: object) -> Iterator[str]:
    """Call a function, and yield the texts of its result or of its error."""
    try:
        yield repr(function(*arguments))  # type: ignore[operator]
    except (SubscriberError, TypeError, ValueError) as error:
        yield f"{error} {error!r} {traceback.format_exc()}"


def outputs(dsn: str, handler: logging.Handler, records: list[logging.LogRecord]) -> Iterator[str]:
    yield from fails(Conninfo.parse, dsn)
    with suppress(SubscriberError):
        yield from fails(lambda: Conninfo.parse(dsn).with_(colour="red"))
    yield from fails(lambda: asyncio.run(resolve_dsn(lambda: dsn)))
    yield from fails(lambda: asyncio.run(_connect(dsn)))
    with suppress(ArgumentError, ValueError, AttributeError):
        url = make_url(dsn)
        yield from fails(lambda: asyncio.run(resolve_dsn(url)))
    literal = "'" + dsn.replace("'", "''") + "'"
    for text in (literal, f"'{dsn}'", f"E'{dsn}'", f"$${dsn}$$"):
        yield from fails(parse, f"CREATE SUBSCRIPTION s CONNECTION {text} PUBLICATION p WITH")
    for text in (f'could not connect to "{dsn}"', f"invalid: {dsn}"):
        yield from fails(lambda text=text: ServerError({"M": text, "D": text, "H": text, "W": text}))
        telemetry.log_error(SubscriberError(text, detail=text, hint=text))
        telemetry.log(telemetry.WARNING, text, detail=text, context=[text])
    for record in records:
        yield f"{record.getMessage()} {PostgresFormatter().format(record)} {JsonFormatter().format(record)}"
    records.clear()
    yield " ".join(hidden(["subscriber", "run", "--target", dsn, f"--apply-target={dsn}"]))
    yield " ".join(hidden(["subscriber", "exec", f"CREATE SUBSCRIPTION s CONNECTION {literal} PUBLICATION p"]))


async def _connect(dsn: str) -> None:
    parsed = Conninfo.parse(dsn)
    if parsed.get("host") == "127.0.0.1" and parsed.get("port") == "1":
        await connect(parsed, timeout=5)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize(
    ("spellings", "seed"), [(200, 0), *(pytest.param(1000, seed, marks=pytest.mark.soak) for seed in range(10))]
)
def test_no_output_shows_a_password(spellings: int, seed: int) -> None:
    number = random.Random(seed)
    handler = _Records()
    telemetry.logger.addHandler(handler)
    try:
        for _ in range(spellings):
            dsn, core = spelling(number)
            for text in outputs(dsn, handler, handler.records):
                assert core not in text, f"{dsn!r} is shown in: {text}"
    finally:
        telemetry.logger.removeHandler(handler)
