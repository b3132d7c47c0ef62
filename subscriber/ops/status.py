"""`subscriber status`: what the subscriptions of a target are doing."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.errors import SubscriberError


async def show(target_dsn: str, names: Sequence[str], *, json: bool, watch: bool, interval: float) -> int:
    """Print the subscriptions called `names` (empty: all); every `interval` seconds anew with `watch`."""
    raise SubscriberError("this version of subscriber has no status yet")
