"""`subscriber tail`: the decoded change stream."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.errors import SubscriberError


async def follow(
    source_dsn: str, publications: Sequence[str], *, slot: str | None, limit: int | None, json: bool
) -> int:
    """Print changes until `limit` (None: for ever), read from `slot` (None: a temporary one)."""
    raise SubscriberError("this version of subscriber has no tail yet")
