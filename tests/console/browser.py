"""A headless Chromium, driven over the pipe of the Chrome DevTools Protocol; no driver needs to be installed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
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


class Chromium:
    """The process of a browser with an empty profile. Its tabs are used one after another.

    Attributes:
        answers: the end of the pipe that answers and events come from.
        commands: the end of the pipe for commands.
        received: the begin of a message whose end is not received yet.
        numbers: of the commands of all tabs.
    """

    def __init__(self, profile: Path) -> None:
        """Start the process. It takes 1.7 s of a processor."""
        assert CHROMIUM is not None
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self.received = b""
        self.numbers = itertools.count(1)

    def close(self) -> None:
        """End the process."""
        os.close(self.commands)
        os.close(self.answers)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Browser:
    """One tab of a browser. Other tabs have other cookies.

    Attributes:
        errors: errors and warnings of the console, exceptions, and requests that failed.
        requests: the addresses of all requests.
        bytes: the received bytes of each request.
    """

    chromium: Chromium
    session: str = ""
    errors: list[str] = field(default_factory=list)
    requests: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def read(self) -> None:
        """Read the answers and events that are there."""
        data = os.read(self.chromium.answers, 1 << 20)
        if not data:  # the browser has ended
            asyncio.get_running_loop().remove_reader(self.chromium.answers)
        *messages, self.chromium.received = (self.chromium.received + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                answer = self._answers.pop(message["id"], None)
                if answer is not None and not answer.done():  # the caller may have been cancelled
                    answer.set_result(message)
            elif message.get("sessionId") == self.session:
                self._take(message["method"], message.get("params", {}))

    def _take(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests[parameters["requestId"]] = parameters["request"]["url"]
            case "Network.dataReceived":
                number = parameters["requestId"]
                self.bytes[number] = self.bytes.get(number, 0) + parameters["dataLength"]

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self.chromium.numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.chromium.commands, json.dumps(message).encode() + b"\0")
        with anyio.fail_after(PATIENCE):
            response = await answer
        assert "error" not in response, (method, response)
        result: dict[str, Any] = response["result"]
        return result

    async def start(self) -> str:
        """Open the tab. Returns the number of its profile."""
        context = str((await self.call("Target.createBrowserContext"))["browserContextId"])
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return context

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
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

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
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await anyio.Path(path).write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def opened_tab(chromium: Chromium) -> AsyncIterator[Browser]:
    """Open a tab for the block."""
    browser = Browser(chromium)
    loop = asyncio.get_running_loop()
    loop.add_reader(chromium.answers, browser.read)
    try:
        context = await browser.start()
        yield browser
        browser.session = ""
        await browser.call("Target.disposeBrowserContext", browserContextId=context)
    finally:
        loop.remove_reader(chromium.answers)


@asynccontextmanager
async def running_browser(profile: Path) -> AsyncIterator[Browser]:
    """Run a browser with one tab for the block."""
    chromium = Chromium(profile)
    try:
        async with opened_tab(chromium) as browser:
            yield browser
    finally:
        chromium.close()
