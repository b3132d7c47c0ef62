"""The report as one HTML page: no script, no other resource, light and dark. It contains the report as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from subscriber.formatting import in_seconds
from subscriber.html_page import html_page, shown
from subscriber.migration.report.document import Entry, of_kind

_STYLE = """table { width: 100%; }
td { vertical-align: top; }
td.number { text-align: right; white-space: nowrap; }
pre { margin: 0; white-space: pre-wrap; }"""
_SERVER = ("server", "version", "database", "system", "position", "applications write to", "phase")
_STEP = ("began", "server", "command", "step", "duration", "position", "statements and result")
_ROWS = ("table", "rows, source", "rows, target", "checksum, source", "checksum, target", "")


def report_page(entries: Sequence[Entry]) -> str:
    """Return the page of a report. All texts are escaped, also those from the servers."""
    head = entries[0]
    pause = "no move has opened a server" if head["pause"] is None else in_seconds(head["pause"])
    body = [
        f"<p>Created at {shown(head['created'])}. Pause without writes: {pause}.</p>",
        f"<p>Hash: <code>{shown(entries[-1]['hash'])}</code></p>",
        "<h2>Servers</h2>",
        _table(_SERVER, _servers(entries)),
        "<h2>Waived findings</h2>",
        _list(entry["name"] for entry in of_kind(entries, "waived")),
        "<h2>Steps</h2>",
        _table(_STEP, _steps(entries)),
        "<h2>Tables</h2>",
        _table(_ROWS, _tables(entries)),
    ]
    # "<" would end the element of the JSON, or begin a comment in it.
    report = json.dumps(list(entries)).replace("<", "\\u003c")
    body.append(f'<script type="application/json" id="report">{report}</script>')
    return html_page(f"Move {head['name']}", "\n".join(body), style=_STYLE)


def _servers(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "server"):
        names = ("side", "version", "database", "system", "lsn", "serving", "phase")
        yield [_cell(shown(entry[name])) for name in names]


def _steps(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "step"):
        said = "".join(f"<pre>{shown(statement)}</pre>" for statement in entry["statements"])
        details = entry["detail"].items()
        said += "".join(f"<div>{shown(name)}: {shown(json.dumps(value))}</div>" for name, value in details)
        if entry["error"] is not None:
            said += f'<div class="wrong">{shown(entry["error"])}</div>'
        elif entry["ended"] is None:
            said += '<div class="wrong">it has not ended</div>'
        seconds = "" if entry["seconds"] is None else in_seconds(entry["seconds"])
        texts = [shown(entry[name]) for name in ("began", "side", "command", "step")]
        yield [*map(_cell, texts), _cell(seconds, number=True), _cell(shown(entry["lsn"])), _cell(said)]


def _tables(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "table"):
        sides = [entry["source"] or {}, entry["target"] or {}]
        rows = [_cell(shown(side.get("rows")), number=True) for side in sides]
        checksums = [_cell(shown(side.get("checksum")), number=True) for side in sides]
        same = '<span class="good">same</span>' if entry["same"] else '<span class="wrong">different</span>'
        yield [_cell(shown(entry["name"])), *rows, *checksums, _cell(same)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{shown(text)}</th>" for text in heads)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>" if body else "<p>none</p>"


def _list(texts: Iterable[str]) -> str:
    items = "\n".join(f"<li>{shown(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else "<p>none</p>"


def _cell(text: str, *, number: bool = False) -> str:
    return f'<td class="number">{text}</td>' if number else f"<td>{text}</td>"
