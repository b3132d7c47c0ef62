"""The actions of `subscriber quarantine`. Imported for --help, so it imports nothing."""

from __future__ import annotations

from enum import StrEnum


class Action(StrEnum):
    """The actions of the command."""

    LIST = "list"
    SHOW = "show"
    RETRY = "retry"
    DISCARD = "discard"
    EDIT = "edit"
