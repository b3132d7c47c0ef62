"""`subscriber demo`: the main job between two servers from the wheel."""

from __future__ import annotations

from subscriber.errors import SubscriberError


async def run_demo(*, seconds: int, scale: int, keep: bool) -> int:
    """Show it and print what it proved; 1 if both sides differ."""
    raise SubscriberError("this version of subscriber has no demo yet")
