"""Why a row has no value for a column."""

from __future__ import annotations

from enum import Enum
from typing import Literal


class Missing(Enum):
    """Why a row has no value for a column. Neither is NULL, which is None; both are false."""

    UNCHANGED = "unchanged"
    NOT_SENT = "not sent"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Literal[Missing.UNCHANGED] = Missing.UNCHANGED
NOT_SENT: Literal[Missing.NOT_SENT] = Missing.NOT_SENT
