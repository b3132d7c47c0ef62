"""Wording: the words of messages that depend on the version of the target's server.

PostgreSQL 19 prints positions and describes conflicts in other words than 18. A program that reads the server's log
expects those of its server. A message in PostgreSQL's words takes the wording as an argument. Our own messages have one
wording.
"""

from __future__ import annotations

from enum import Enum

from subscriber.lsn import Lsn


class Wording(Enum):
    """The messages of the server, by the first major version that has them."""

    POSTGRESQL_18 = 18
    POSTGRESQL_19 = 19

    @classmethod
    def of(cls, major: int) -> Wording:
        """Return the wording of a server of a major version."""
        return cls.POSTGRESQL_19 if major >= cls.POSTGRESQL_19.value else cls.POSTGRESQL_18

    def position(self, lsn: Lsn) -> str:
        """Return a position as the server prints it."""
        return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}" if self is Wording.POSTGRESQL_19 else str(lsn)
