"""The report as one HTML page: no script, no other resource, light and dark. It contains the report as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from subscriber.display import printable
from subscriber.formatting import in_seconds
from subscriber.migration.report.document import Entry, of_kind

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }}
h2 {{ font-size: 1.15em; margin: 1.6em 0 .3em; }}
table {{ border-spacing: 0; }}
th {{ font-weight: normal; text-align: left; vertical-align: top; opacity: .65; }}
th, td {{ padding: .1em 1em .1em 0; overflow-wrap: anywhere; }}
.good {{ color: #1a8a3c; }} .busy {{ color: #a86b00; }} .wrong {{ color: #d03030; }}
{style}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
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
        f"<p>Created at {_shown(head['created'])}. Pause without writes: {pause}.</p>",
        f"<p>Hash: <code>{_shown(entries[-1]['hash'])}</code></p>",
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
    return _PAGE.format(title=_shown(f"Move {head['name']}"), body="\n".join(body), style=_STYLE)


def _servers(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "server"):
        names = ("side", "version", "database", "system", "lsn", "serving", "phase")
        yield [_cell(_shown(entry[name])) for name in names]


def _steps(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "step"):
        said = "".join(f"<pre>{_shown(statement)}</pre>" for statement in entry["statements"])
        details = entry["detail"].items()
        said += "".join(f"<div>{_shown(name)}: {_shown(json.dumps(value))}</div>" for name, value in details)
        if entry["error"] is not None:
            said += f'<div class="wrong">{_shown(entry["error"])}</div>'
        elif entry["ended"] is None:
            said += '<div class="wrong">it has not ended</div>'
        seconds = "" if entry["seconds"] is None else in_seconds(entry["seconds"])
        texts = [_shown(entry[name]) for name in ("began", "side", "command", "step")]
        yield [*map(_cell, texts), _cell(seconds, number=True), _cell(_shown(entry["lsn"])), _cell(said)]


def _tables(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    for entry in of_kind(entries, "table"):
        sides = [entry["source"] or {}, entry["target"] or {}]
        rows = [_cell(_shown(side.get("rows")), number=True) for side in sides]
        checksums = [_cell(_shown(side.get("checksum")), number=True) for side in sides]
        same = '<span class="good">same</span>' if entry["same"] else '<span class="wrong">different</span>'
        yield [_cell(_shown(entry["name"])), *rows, *checksums, _cell(same)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_shown(text)}</th>" for text in heads)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>" if body else "<p>none</p>"


def _list(texts: Iterable[str]) -> str:
    items = "\n".join(f"<li>{_shown(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else "<p>none</p>"


def _cell(text: str, *, number: bool = False) -> str:
    return f'<td class="number">{text}</td>' if number else f"<td>{text}</td>"


def _shown(value: object) -> str:
    """Return a value as HTML. Invisible characters are escapes, and None is empty."""
    return "" if value is None else escape(printable(str(value)))
