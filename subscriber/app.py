"""App: the code of a program that a launcher needs, for `subscriber run --app` and for programs alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Literal, TypeAlias

from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.hooks.config import Hooks
from subscriber.worker.supervision.launcher import Launcher

ErrorHandler: TypeAlias = Callable[[str, BaseException], Awaitable[None] | None]  # name of the subscription, error
OnError: TypeAlias = Literal["retry", "raise"] | ErrorHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """The hooks, resolvers and handler of errors of a program.

    `subscriber run --app package.module:name` runs subscriptions with them, and `subscriber exec --app` creates
    subscriptions with the hooks. A program passes the same object to connect().

    Raises:
        TypeError: `only` is a string.
        ValueError: `on_error` has another value.
    """

    hooks: Mapping[str, Hooks] = field(default_factory=dict)  # by name of the subscription
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)  # by the name in conflict_policy = 'call name'
    only: Sequence[str] | None = None  # the subscriptions to run; None: all
    on_error: OnError = "retry"  # as in Database.running()

    def __post_init__(self) -> None:
        if isinstance(self.only, str):
            raise TypeError(f"only is a sequence of names: only=[{self.only!r}]")
        if not callable(self.on_error) and self.on_error not in ("retry", "raise"):
            raise ValueError(f'on_error is {self.on_error!r}, and must be "retry", "raise" or a function')


class RunningApp:
    """An App while its launcher runs.

    Attributes:
        error: the error that has ended the launcher. None: none has.
    """

    def __init__(self, app: App, stop: Callable[[], None]) -> None:
        """`stop` is called once after an error that ends the program's block."""
        self._app = app
        self._stop = stop
        self.error: BaseException | None = None

    async def run(self, launcher: Launcher, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run the launcher until canceled. Its error ends the block."""
        try:
            await launcher.run(on_ready)
        except Exception as error:
            self._end(error)

    async def handle(self, subscription: str, error: BaseException) -> None:
        """React to an error of a worker that a retry alone cannot solve."""
        on_error = self._app.on_error
        if on_error == "raise":
            self._end(error)
        if not callable(on_error):
            return
        try:
            result = on_error(subscription, error)
            if isawaitable(result):
                await result
        except Exception as raised:
            self._end(raised)

    def _end(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._stop()
