"""The page for people at /: `subscriber status` as HTML that reloads itself and loads no other resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from subscriber.display import printable
from subscriber.status import table_states
from subscriber.status.model import StatusSnapshot, SubscriptionStatus, describe, state_in_words

REFRESH = 5  # seconds

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{refresh}">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
h2 {{ font-size: 1.15em; margin: 1.6em 0 .3em; }}
h2 span {{ font-weight: normal; }}
table {{ border-spacing: 0; }}
th {{ font-weight: normal; text-align: left; vertical-align: top; padding-right: 1.5em; opacity: .65; }}
th, h2 {{ white-space: nowrap; }}
td {{ overflow-wrap: anywhere; }}
.good {{ color: #1a8a3c; }} .busy {{ color: #a86b00; }} .wrong {{ color: #d03030; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus], *, standby: bool) -> str:
    """Return the page of all subscriptions. `standby`: another launcher is active, and this one waits."""
    wrong = [status.name for status in statuses if status.is_wrong]
    title = f"subscriber: {', '.join(wrong)}" if wrong else "subscriber"
    role = "another launcher works; this one is its standby" if standby else "this launcher works"
    if look.launcher_pid is None:
        role = "no launcher works"
    head = f"<p>{look.at:%Y-%m-%d %H:%M:%S} UTC, {role}</p>"
    parts = [_subscription(status, look) for status in statuses] or ["<p>no subscriptions</p>"]
    return _PAGE.format(refresh=REFRESH, title=_shown(title), body="\n".join([head, *parts]))


def page_without_target(error: str) -> str:
    """Return the page for the case that the target does not answer."""
    body = f'<p class="wrong">target: {_shown(error)}</p>'
    return _PAGE.format(refresh=REFRESH, title="subscriber: no target", body=body)


def _subscription(status: SubscriptionStatus, look: StatusSnapshot) -> str:
    style = "wrong" if status.is_wrong else "good" if status.state == "streaming" else "busy"
    rows = [_row(label, text, "wrong" if label == "last error" else "") for label, text in describe(status, look.at)]
    rows += [
        _row(table.name, table_states.describe(table), "wrong" if table.error else "busy") for table in status.not_ready
    ]
    return (
        f'<h2>{_shown(status.name)} <span class="{style}">{_shown(state_in_words(status))}</span></h2>\n'
        f"<table>\n{chr(10).join(rows)}\n</table>"
    )


def _row(label: str, text: str, style: str) -> str:
    shown = f'<td class="{style}">' if style else "<td>"
    return f"<tr><th>{_shown(label)}</th>{shown}{_shown(text)}</td></tr>"


def _shown(text: str) -> str:
    return escape(printable(text))
