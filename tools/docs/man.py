"""man/subscriber.1: the manual page, from the same source as docs/reference/commands.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

from subscriber import __version__
from tools.docs.commands import EXIT_STATUSES, HEAD, Parameter, commands, parameters, root, usage_line

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_CODE = re.compile(r"`([^`]+)`")
_SITE = "docs/reference of the source has the pages about statements, settings, the environment and errors."


def page() -> str:
    lines = [
        '.\\" Written from the code by `make docs`.',
        f'.TH SUBSCRIBER 1 "" "subscriber {__version__}"',
        ".SH NAME",
        f"subscriber \\- {_roff(root().help or '')}",
        ".SH SYNOPSIS",
        ".B subscriber",
        _roff("[--config FILE] COMMAND [OPTION]... [ARGUMENT]..."),
        ".SH DESCRIPTION",
        *_paragraphs(HEAD),
        ".SH COMMANDS",
    ]
    for name, command in commands().items():
        lines += [f".SS {_roff(usage_line(name, command))}", *_paragraphs(command.help or "")]
        for parameter in parameters(command):
            lines += [".TP", f"\\fB{_roff(', '.join(parameter.names))}\\fR", _roff(" ".join(_facts(parameter)))]
    lines += [".SH EXIT STATUS"]
    for status, meaning in EXIT_STATUSES:
        lines += [".TP", f".B {status}", _roff(meaning)]
    return "\n".join([*lines, ".SH SEE ALSO", _roff(_SITE), ""])


def _facts(parameter: Parameter) -> Iterator[str]:
    yield parameter.help
    if parameter.default == "required":
        yield "Required."
    elif parameter.default:
        yield f"Default: {parameter.default}."
    if parameter.variable:
        yield f"Variable: {parameter.variable}."


def _paragraphs(markdown: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", markdown.strip())):
        if number:
            yield ".PP"
        yield _roff(" ".join(paragraph.split()))


def _roff(markdown: str) -> str:
    """Return a text without the marks of Markdown, in which no character is a command of roff."""
    text = _LINK.sub(r"\1", markdown).replace("\\", "\\e").replace("-", "\\-")
    text = _CODE.sub(r"\\fB\1\\fR", text)
    text = _NOT_ASCII.sub(lambda found: f"\\[u{ord(found[0]):04X}]", text)
    return f"\\&{text}" if text.startswith((".", "'")) else text
