"""A headless Chromium, driven over the pipe of the Chrome DevTools Protocol; no driver needs to be installed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "Chromium is not installed (Debian: apt-get install chromium)"
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
PATIENCE = 150.0  # seconds for a condition on a machine that has other work


@dataclass
class Browser:
    """One tab of a browser.

    Attributes:
        errors: errors and warnings of the console, exceptions, and requests that failed.
        requests: the addresses of all requests.
        bytes: the received bytes of each request.
    """

    reader: asyncio.StreamReader
    writer: int
    session: str = ""
    errors: list[str] = field(default_factory=list)
    requests: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def read(self) -> None:
        """Read answers and events until the browser ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = json.loads((await self.reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    answer = self._answers.pop(message["id"])
                    if not answer.done():  # the caller may have been cancelled
                        answer.set_result(message)
                else:
                    self._take(message["method"], message.get("params", {}))

    def _take(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(str([one.get("value") for one in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests[parameters["requestId"]] = parameters["request"]["url"]
            case "Network.dataReceived":
                number = parameters["requestId"]
                self.bytes[number] = self.bytes.get(number, 0) + parameters["dataLength"]

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        with anyio.fail_after(PATIENCE):
            found = await answer
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    async def start(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window, and the user's preference of colors."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page, or of its promise."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    async def text(self) -> str:
        """Return the text that the page shows."""
        return str(await self.value("document.body.innerText"))

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        with anyio.move_on_after(PATIENCE):
            while not await self.value(f"Boolean({expression})"):
                await anyio.sleep(0.05)
            return
        raise AssertionError(f"not true: {expression}\n{await self.text()}\n{self.errors}")

    async def wait_for_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        await self.wait_for(f"document.body.innerText.includes({json.dumps(text)})")

    async def press(self, key: str, code: int) -> None:
        """Press a key, such as Tab, whose code is 9, or Enter, whose code is 13."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture of the page. `whole`: with the parts below the window."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await anyio.Path(path).write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def running_browser(profile: Path) -> AsyncIterator[Browser]:
    """Run a browser with an empty profile."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"),
        pass_fds=(commands, answers),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(answers)
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb")
    )
    browser = Browser(reader, to_browser)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(browser.read)
            await browser.start()
            yield browser
            tasks.cancel_scope.cancel()
    finally:
        transport.close()
        os.close(to_browser)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
