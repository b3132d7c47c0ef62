"""Snapshots of a target's subscriptions for all readers: the page, /metrics, /health and /status.json.

One read of the catalog on a separate connection serves all requests within `http_max_age`; concurrent requests wait for
the same read. The connection is closed before the publishers are queried, so that neither the workers' sessions nor
DROP DATABASE wait for it.

run() takes snapshots by itself, so that the history of the last hour has no gaps. A snapshot costs time of the process
that replicates. Without an open stream, run() takes one in IDLE_INTERVAL. The time between two snapshots
grows with the number of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import anyio

from subscriber.catalog.connection import CatalogConnection
from subscriber.console.facts import SubscriptionFacts, read_facts
from subscriber.console.stored_history import StoredHistory
from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.settings import DEFAULTS, Settings
from subscriber.status import collect
from subscriber.status.history import RESOLUTION, StatusHistory
from subscriber.status.model import SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot

IDLE_INTERVAL = RESOLUTION.total_seconds()
WATCHED_INTERVAL = 2.0  # seconds
TABLES_PER_SECOND = 1000  # a snapshot of 10,000 tables is taken every 10 s


@dataclass(frozen=True, slots=True)
class Seen:
    """One snapshot of all subscriptions. `look` is None if the target did not answer; `error` has the reason then."""

    look: StatusSnapshot | None = None
    statuses: Sequence[SubscriptionStatus] = ()
    error: str | None = None
    facts: Mapping[str, SubscriptionFacts] = field(default_factory=dict)  # of the subscriptions that open streams show
    number: int = 0  # rises with each snapshot

    def is_standby(self, launcher_pid: int | None) -> bool:
        """Return True if a launcher other than the one with this process id is active."""
        return self.look is not None and self.look.launcher_pid not in (None, launcher_pid)


class Observer:
    """Takes a snapshot on request, at most once in `http_max_age`.

    Attributes:
        history: the last hour of all subscriptions.
    """

    def __init__(
        self, target: str, settings: Settings = DEFAULTS, is_writer: Callable[[Seen], bool] = lambda _: False
    ) -> None:
        """Create an observer.

        Args:
            target: the connection string of the target.
            settings: limits and time-outs.
            is_writer: returns True if this process stores the history of the target.
        """
        self.history = StatusHistory()
        self._stored = StoredHistory(self.history, settings)
        self._is_writer = is_writer
        self._target = target
        self._max_age = settings.http_max_age
        self._timeout = settings.http_target_timeout
        self._settings = settings
        self._lock = anyio.Lock()
        self._seen = Seen()
        self._at = -self._max_age  # on the monotonic clock
        self._watched: Counter[str | None] = Counter()  # open streams, by their subscription; None: overviews
        self._news = anyio.Event()
        self._wake = anyio.Event()

    async def see(self, name: str | None = None) -> Seen:
        """Return a snapshot that is at most `http_max_age` old.

        Args:
            name: a watched subscription, whose facts the snapshot has. None: the snapshot may have none.
        """
        async with self._lock:
            if monotonic() - self._at >= self._max_age or self._lacks(name):
                self._seen = await self._collect(self._seen.number + 1)
                self._at = monotonic()
                self._news.set()
                self._news = anyio.Event()
            return self._seen

    def _lacks(self, name: str | None) -> bool:
        """Return True if the snapshot has a watched subscription and not its facts."""
        look = self._seen.look
        exists = look is not None and any(subscription.name == name for subscription in look.subscriptions)
        return exists and name in self._watched and name not in self._seen.facts

    @property
    def seen(self) -> Seen:
        """The last snapshot. Its number is 0 before the first one."""
        return self._seen

    def refresh(self) -> None:
        """Take a snapshot soon, because an action has changed a subscription."""
        self._at = -self._max_age
        self._wake.set()

    async def latest(self) -> Seen:
        """Return the last snapshot while a stream is open, else one of see()."""
        return self._seen if self._watched and self._seen.number else await self.see()

    async def next(self, after: int) -> Seen:
        """Wait for a snapshot with a number above `after`."""
        while self._seen.number <= after:
            await self._news.wait()
        return self._seen

    @contextmanager
    def watched(self, name: str | None) -> Iterator[None]:
        """Take snapshots more often in this block, with the facts of a subscription. `name`: None for none."""
        self._watched[name] += 1
        self._wake.set()
        try:
            yield
        finally:
            self._watched[name] -= 1
            if not self._watched[name]:
                del self._watched[name]

    async def run(self) -> None:
        """Take snapshots until cancelled."""
        while True:
            await self.see()
            self._wake = anyio.Event()
            with anyio.move_on_after(self._interval()):
                await self._wake.wait()

    def _interval(self) -> float:
        tables = 0 if self._seen.look is None else sum(map(len, self._seen.look.relations.values()))
        return max(WATCHED_INTERVAL if self._watched else IDLE_INTERVAL, tables / TABLES_PER_SECOND)

    async def _collect(self, number: int) -> Seen:
        facts = {}
        try:
            with anyio.fail_after(self._timeout):
                async with CatalogConnection.open(self._target, "subscriber status") as catalog:
                    look = await collect.read_catalog(catalog)
                    if look.subscriptions:
                        await self._stored.read_once(catalog)
                    if self._is_writer(self._seen):
                        await self._stored.write(catalog, [known.oid for known in look.subscriptions], look.at)
                    for subscription in look.subscriptions:
                        if subscription.name in self._watched:
                            async with catalog.use() as connection:
                                facts[subscription.name] = await read_facts(connection, subscription)
        except TimeoutError:
            return Seen(error=f"no answer within {self._timeout:.0f} s", number=number)
        except (SubscriberError, OSError) as error:
            reason = error.message if isinstance(error, SubscriberError) else redact(str(error))
            return Seen(error=reason, number=number)
        statuses = await collect.assess_all(look, self._settings)
        return Seen(look, self.history.add(look, statuses), facts=facts, number=number)
