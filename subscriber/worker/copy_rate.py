"""CopyRate: limits the bytes that all initial copies of a launcher read in a second."""

from __future__ import annotations

from time import monotonic

import anyio


class CopyRate:
    """The rate that several copies share. A copy that has read more than its share waits."""

    def __init__(self, limit: int | None = None) -> None:
        """Create the rate.

        Args:
            limit: bytes in a second. None: there is no limit.
        """
        self._limit = limit
        self._free_at = 0.0  # monotonic time at which everything so far is within the limit

    async def spend(self, size: int) -> None:
        """Wait until `size` further bytes are within the limit.

        Cancellation: the bytes count.
        """
        if self._limit is None:
            return
        now = monotonic()
        self._free_at = max(self._free_at, now) + size / self._limit
        await anyio.sleep(self._free_at - now)
