"""The mark of the tests' passwords: a word that no output may contain, see tests/plugins/fix_passwords.py."""

from __future__ import annotations

MARK = "Zq7pLw"
