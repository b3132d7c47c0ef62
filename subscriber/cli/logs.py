"""The formats of log records: coloured for people, JSON for programs, PostgreSQL's format for log analyzers.

rich      the time, the message, and DETAIL, HINT and CONTEXT below it
json      one object on each line: time, level, message, detail, hint, command, context and the keys of telemetry.Keys
postgres  a server's stderr log with log_line_prefix = '%m [%p] '; the only format with row values, in the same places
          as in PostgreSQL's own log
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from subscriber import telemetry
from subscriber.display import json_text, printable, printable_lines
from subscriber.lsn import Lsn
from subscriber.redaction import redact
from subscriber.telemetry import Parts

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = {
    telemetry.DEBUG: "DEBUG",
    telemetry.LOG: "LOG",
    telemetry.WARNING: "WARNING",
    telemetry.ERROR: "ERROR",
    telemetry.FATAL: "FATAL",
}
STYLES = {"DEBUG": "dim", "LOG": "green", "WARNING": "yellow", "ERROR": "bold red", "FATAL": "bold white on red"}


class LogFormat(StrEnum):
    """The values of `--log-format`."""

    RICH = "rich"
    JSON = "json"
    POSTGRES = "postgres"


def configure(log_format: LogFormat, *, level: int = telemetry.LOG, stream: TextIO | None = None) -> None:
    """Send all records of this process to `stream` (None: stderr); those of other libraries from WARNING on."""
    stream = stream or sys.stderr
    handler: logging.Handler
    match log_format:
        case LogFormat.RICH:
            handler = RichHandler(stream)
        case LogFormat.JSON:
            handler = logging.StreamHandler(stream)
            handler.setFormatter(JsonFormatter())
        case LogFormat.POSTGRES:
            handler = logging.StreamHandler(stream)
            handler.setFormatter(PostgresFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(telemetry.WARNING)
    telemetry.logger.setLevel(level)
    telemetry.follow_servers(level if log_format is LogFormat.POSTGRES else None)


class _Redacted(logging.Formatter):
    """The standard library's formatter, with the passwords of connection strings removed."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def redact_unconfigured() -> None:
    """Hide passwords in the log records of libraries until configure() is called, or if it is never called."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Redacted())


def _level(record: logging.LogRecord) -> str:
    return LEVELS.get(record.levelno, record.levelname)


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _parts(record: logging.LogRecord, kind: str) -> Parts:
    """Return the parts of a record. `kind` is `parts` or `exact`; a record of another library has only a message."""
    parts = getattr(record, kind, None)
    return parts if isinstance(parts, Parts) else Parts(record.getMessage()).redacted()


def _lines(parts: Parts) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the lines below the message, in PostgreSQL's order."""
    if parts.detail:
        yield "DETAIL", parts.detail
    if parts.hint:
        yield "HINT", parts.hint
    if parts.context:
        yield "CONTEXT", "\n".join(parts.context)


def _traceback(record: logging.LogRecord) -> str:
    return redact(logging.Formatter().formatException(record.exc_info)) if record.exc_info else ""


class PostgresFormatter(logging.Formatter):
    """Formats records like PostgreSQL's stderr log. Source: elog.c, send_message_to_server_log()."""

    def format(self, record: logging.LogRecord) -> str:
        moment = _time(record)
        prefix = f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d} UTC [{record.process}] "
        parts = _parts(record, "exact")
        lines = [(_level(record), parts.message), *_lines(parts)]
        if trace := _traceback(record):
            lines.append(("BACKTRACE", trace))
        return "\n".join(f"{prefix}{label}:  {printable_lines(text)}" for label, text in lines)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object on each line. Keys are in a fixed order; keys whose value is None are left out."""

    def format(self, record: logging.LogRecord) -> str:
        parts = _parts(record, "parts")
        moment = _time(record).isoformat(timespec="milliseconds")
        values: dict[str, Any] = {"time": moment, "level": _level(record), "pid": record.process}
        values |= {"message": parts.message, "detail": parts.detail, "hint": parts.hint, "command": parts.command}
        values["context"] = list(parts.context) or None
        values |= getattr(record, "keys", {"logger": record.name})
        values["traceback"] = _traceback(record) or None
        kept = {k: str(v) if isinstance(v, Lsn) else v for k, v in values.items() if v is not None}
        return json_text(kept, default=str)


class RichHandler(logging.Handler):
    """Formats for people: colours on a terminal, plain text elsewhere. rich is imported at the first record."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._console: Console | None = None

    def emit(self, record: logging.LogRecord) -> None:
        from rich.console import Console
        from rich.text import Text

        try:
            if self._console is None:
                self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
            level, parts = _level(record), _parts(record, "parts")
            line = Text.assemble((f"{_time(record).astimezone():%H:%M:%S} ", "dim"))
            line.append(f"{level:<8}", STYLES.get(level, ""))
            if subscription := getattr(record, "keys", {}).get("subscription"):
                line.append(f"{printable(subscription)}: ", "cyan")
            line.append(printable_lines(parts.message, " " * 17))
            for label, text in [*_lines(parts), ("", _traceback(record))]:
                if text:
                    line.append(f"\n         {label:<8}", "dim").append(printable_lines(text, " " * 17))
            self._console.print(line)
        except Exception:
            self.handleError(record)
