"""Remedy: what to do about an error, with the exact next command as data.

The text of a remedy is made here and nowhere else: `str(remedy)` is the HINT of an error, of a log record and of the
status. parts() has the same text with its commands marked, for pages on which a command can be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from subscriber.sql_text import printable, sql_text

_ENDS = (".", ";", ":", "?", "!")


class Part(NamedTuple):
    """A part of a remedy's text."""

    text: str
    is_command: bool


@dataclass(frozen=True, slots=True)
class Remedy:
    """The next steps after an error.

    Attributes:
        advice: what to do, in words. Empty: the command says it.
        command: the exact next command: a statement with its semicolon, or a command of a shell. None: words suffice.
            Its names and strings get escapes for invisible characters, see sql_text.py.
        then: the step after the command. None: there is none.
        alternative: another way. None: there is none.
    """

    advice: str = ""
    command: str | None = None
    then: Remedy | None = None
    alternative: Remedy | None = None

    def __post_init__(self) -> None:
        """Make the command safe to paste. A command of a shell is quoted by its author, and has no such characters."""
        if self.command is not None and printable(self.command) != self.command:
            object.__setattr__(self, "command", sql_text(self.command))

    @classmethod
    def of(cls, hint: str | Remedy | None) -> Remedy | None:
        """Return the remedy of a hint that may be words only. None: there is no hint."""
        if hint is None or isinstance(hint, Remedy):
            return hint
        return cls(hint) if hint else None

    def __str__(self) -> str:
        return "".join(part.text for part in self.parts())

    @property
    def commands(self) -> tuple[str, ...]:
        """All commands, in the order of the text. The first one is the next command."""
        return tuple(part.text for part in self.parts() if part.is_command)

    @property
    def next_command(self) -> str | None:
        """The first command. None: the remedy is words only."""
        return next(iter(self.commands), None)

    def parts(self) -> Iterator[Part]:
        """Yield the text in parts. Words of an alternative begin in lower case, except at the start of the text."""
        for position, (text, is_command) in enumerate(self.steps("")):
            starts = position == 0 and not is_command
            yield Part(_sentence(text) if starts else text, is_command)

    def steps(self, word: str) -> Iterator[Part]:
        """Yield the parts as they follow `word`: Then, Or, or nothing at the start of the text."""
        lead = " ".join(filter(None, (word, self.advice)))
        if self.command is not None:
            if lead:
                yield Part(lead + (" " if lead.endswith(_ENDS) else ": "), is_command=False)
            yield Part(self.command, is_command=True)
        else:
            yield Part(lead, is_command=False)
        last = Part(lead, is_command=False) if self.command is None else Part(self.command, is_command=True)
        for following, remedy in (("Then", self.then), ("Or", self.alternative)):
            if remedy is not None:
                yield Part(_between(last), is_command=False)
                for last in remedy.steps(following):
                    yield last

    def with_alternative(self, remedy: Remedy | None) -> Remedy:
        """Return this remedy, with `remedy` as its last alternative."""
        if remedy is None:
            return self
        last = remedy if self.alternative is None else self.alternative.with_alternative(remedy)
        return Remedy(self.advice, self.command, self.then, last)

    def map(self, function: Callable[[str], str]) -> Remedy:
        """Return the remedy with `function` applied to each text of it."""
        return Remedy(
            function(self.advice),
            None if self.command is None else function(self.command),
            None if self.then is None else self.then.map(function),
            None if self.alternative is None else self.alternative.map(function),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a JSON value."""
        return {
            "advice": self.advice,
            "command": self.command,
            "then": json_of(self.then),
            "alternative": json_of(self.alternative),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Remedy | None:
        """Return the remedy of as_json(). None: there is none."""
        if value is None:
            return None
        then, alternative = cls.from_json(value["then"]), cls.from_json(value["alternative"])
        return cls(value["advice"], value["command"], then, alternative)


def run(command: str) -> Remedy:
    """Return the remedy that is one command, and no words."""
    return Remedy(command=command)


def on_publisher(command: str) -> Remedy:
    """Return the remedy that is one command on the publisher."""
    return Remedy("on the publisher", command)


def on_target(command: str) -> Remedy:
    """Return the remedy that is one command on the target."""
    return Remedy("on the target", command)


def hint_of(remedy: Remedy | None) -> str | None:
    """Return the text of a remedy. None: there is none."""
    return None if remedy is None else str(remedy)


def command_of(remedy: Remedy | None) -> str | None:
    """Return the next command of a remedy. None: it has none, or there is no remedy."""
    return None if remedy is None else remedy.next_command


def json_of(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return a remedy as a JSON value. None: there is none."""
    return None if remedy is None else remedy.as_json()


def _sentence(text: str) -> str:
    """Return the text with a capital at its start. The name of the command keeps its letters."""
    return text if text.startswith("subscriber ") else text[:1].upper() + text[1:]


def _between(last: Part) -> str:
    """Return the end of a step that another step follows. A shell's command ends its line, so that it can be copied."""
    if last.text.endswith(_ENDS):
        return " "
    return "\n" if last.is_command else ". "
