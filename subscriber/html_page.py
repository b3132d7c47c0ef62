"""The frame of pages for people: light and dark, without other resources. All texts in it are escaped."""

from __future__ import annotations

from html import escape

from subscriber.display import printable

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}
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
NO_SCRIPTS = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""


def html_page(title: str, body: str, *, head: str = NO_SCRIPTS, style: str = "") -> str:
    """Return a page.

    Args:
        title: its title and heading, as text.
        body: HTML.
        head: further elements of the head, as HTML.
        style: further rules, as CSS.
    """
    return _PAGE.format(title=shown(title), body=body, head=head, style=style)


def shown(value: object) -> str:
    """Return a value as HTML. Invisible characters are escapes, and None is empty."""
    return "" if value is None else escape(printable(str(value)))
