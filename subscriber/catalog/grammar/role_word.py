"""The words of a statement that stand for a role."""

from __future__ import annotations

from enum import StrEnum


class RoleWord(StrEnum):
    """Roles that are not named but meant."""

    CURRENT_ROLE = "current_role"
    CURRENT_USER = "current_user"
    SESSION_USER = "session_user"
