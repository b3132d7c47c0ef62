"""The progress of a command: one line on stderr, from the second second on.

It is written to a terminal only, and not with `--json`. This module imports only what --help needs.
"""

from __future__ import annotations

import sys
from threading import Lock, Timer
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from subscriber import formatting
from subscriber.display import printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

    from subscriber.comparison.progress import ComparisonProgress

DELAY = 1.0  # seconds without a line, so that quick commands have none
PER_SECOND = 4  # how often the line is drawn


class ProgressLine:
    """The phase of a command, how far it is, and the time that is left."""

    def __init__(self, phase: str, *, json: bool = False, delay: float = DELAY) -> None:
        """Create a line, which is shown in a `with` block.

        Args:
            phase: what the command does first.
            json: the output is for a program. There is no line.
            delay: seconds until it is drawn.
        """
        self._phase = phase
        self._done = self._total = 0
        self._unit = "bytes"
        self._began = monotonic()
        self._lock = Lock()
        self._ended = False
        self._live: Live | None = None
        self._timer = None if json or not sys.stderr.isatty() else Timer(delay, self._draw)

    def __enter__(self) -> ProgressLine:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._live is not None:
                self._live.stop()

    def show(self, phase: str, done: int = 0, total: int = 0, unit: str = "bytes") -> None:
        """Set the phase. `done` and `total` are in `unit`; 0 and 0: not known."""
        if phase != self._phase:
            self._phase, self._began = phase, monotonic()
        self._done, self._total, self._unit = done, total, unit

    def comparison(self, progress: ComparisonProgress) -> None:
        """Show the progress of a comparison or a repair."""
        self.show(progress.phase, progress.done, progress.total, progress.unit)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        spinner = Spinner("dots", style="status.spinner")

        def drawn() -> Spinner:
            seconds = monotonic() - self._began
            spinner.update(text=printable(describe(self._phase, self._done, self._total, self._unit, seconds)))
            return spinner

        with self._lock:
            if self._ended:
                return
            self._live = Live(
                console=Console(stderr=True),
                get_renderable=drawn,
                refresh_per_second=PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # otherwise it is a file or a pipe, whose lines stay there
            )
            self._live.start()


def describe(phase: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Format the progress of a phase that has taken `seconds`: `comparing at 0/15E8A90: 40 % of 1.2 GiB, 12 s left`."""
    if not done or not total:
        return f"{phase}, {formatting.in_seconds(round(seconds))}" if seconds >= 1 else phase
    size = formatting.in_bytes(total) if unit == "bytes" else f"{total:,} {unit}"
    share = f"{phase}: {done * 100 // total} % of {size}"
    left = seconds * (total - done) / done
    return f"{share}, {formatting.in_seconds(left)} left" if left >= 1 else share
