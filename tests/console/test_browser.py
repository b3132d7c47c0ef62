"""The console in a real Chromium: no error in its console, hostile names stay text, light, dark, phone and keyboard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from subscriber.display import printable
from tests.cli.test_http import FREE, served
from tests.cli.test_http_guard import HOSTILE, TABLE, quoted
from tests.console.browser import CHROMIUM, MISSING, Browser, Chromium, opened_tab
from tests.console.test_actions import TOKEN, TOKENS
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=MISSING), pytest.mark.xdist_group("browser")]

PUBLICATION = "<svg onload=alert(3)>\"'</dd><script>{y}"
JSON = {"Content-Type": "application/json"}
PAGE_LIMIT = 150_000  # bytes
BUTTONS = "[...document.querySelectorAll('#actions button')].map((one) => one.textContent)"
BUTTON = "((label) => [...document.querySelectorAll('#actions button')].find((one) => one.textContent === label))"
PAINT = "performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint')?.startTime"


async def act_by_keyboard(browser: Browser) -> None:
    """Sign in with a wrong and a right token, and disable the subscription."""
    await browser.wait_for(f"{BUTTONS}.includes('Sign in to act')")
    await browser.value(f"{BUTTON}('Sign in to act').focus()")
    await browser.press("Enter", 13)
    for token in ("wrong", TOKEN):
        await browser.wait_for("document.activeElement.id === 'token'")
        await browser.call("Input.insertText", text=token)
        await browser.press("Enter", 13)
        if token == "wrong":
            await browser.wait_for("document.getElementById('token-error')?.innerText.includes('not a token')")
    await browser.wait_for(f"{BUTTONS}.includes('Disable')")
    await browser.value(f"{BUTTON}('Disable').focus()")
    await browser.press("Enter", 13)
    await browser.wait_for("document.getElementById('dialog').open")
    assert await browser.value("document.querySelector('#dialog .command').textContent") == (
        f"ALTER SUBSCRIPTION {quoted(HOSTILE)} DISABLE;"
    )
    await browser.value("document.querySelector('#dialog .primary').focus()")
    await browser.press("Enter", 13)


async def attack_from_another_origin(browser: Browser, port: int) -> None:
    """Act and read as the page of another site does, with what a browser sends for it."""
    await browser.open("data:text/html,<title>evil</title>")
    await browser.wait_for("document.title === 'evil'")
    address = f"http://127.0.0.1:{port}"
    enable = {"action": "enable", "subscription": HOSTILE}
    requests: list[tuple[str, dict[str, Any]]] = [
        (f"{address}/actions", {"method": "POST", "mode": "no-cors", "body": json.dumps(enable)}),
        (f"{address}/actions", {"method": "POST", "headers": JSON, "body": json.dumps(enable)}),
        (f"{address}/session", {"method": "POST", "headers": JSON, "body": json.dumps({"token": TOKEN})}),
        (f"{address}/console.json", {}),
        (f"{address}/status.json", {"credentials": "include"}),
    ]
    for url, options in requests:
        call = f"fetch({json.dumps(url)}, {json.dumps(options)}).then((one) => one.type, () => 'refused')"
        assert await browser.value(call) == "refused", url
    await browser.value(
        f"document.body.innerHTML = `<form method=post enctype=text/plain action={address}/actions>"
        f"<input name='{json.dumps({**enable, 'x': ''})[:-2]}' value='\"}}'></form><iframe src={address}/></iframe>`"
    )
    await browser.value("document.forms[0].submit()")
    await browser.wait_for(f"location.href === '{address}/actions'")


async def test_the_page_shows_hostile_names_as_text(
    source_db: Database, target_db: Database, subscriber: Subscriber, chromium: Chromium
) -> None:
    create = f"CREATE TABLE {quoted(TABLE)} (a int PRIMARY KEY)"
    publication = quoted(PUBLICATION)
    await source_db.execute(
        create, f"CREATE PUBLICATION {publication} FOR ALL TABLES", f"INSERT INTO {quoted(TABLE)} VALUES (1)"
    )
    await target_db.execute(create, f"INSERT INTO {quoted(TABLE)} VALUES (1)")  # so that its copy fails
    await subscriber.create(source_db, publication, quoted(HOSTILE), slot_name="s")
    async with (
        served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client,
        opened_tab(chromium) as browser,
    ):
        await browser.open(f"http://127.0.0.1:{client.port}/")
        await browser.wait_for("document.querySelector('.summary.tone-wrong .problem')")
        assert HOSTILE in await browser.text()
        assert await browser.value("document.title") == "⚠ subscriber"
        first_paint = await browser.value(PAINT)
        for _ in range(10):
            await browser.press("Tab", 9)
            if await browser.value("Boolean(document.activeElement.closest('.summary .who'))"):
                break
        await browser.press("Enter", 13)
        await browser.wait_for("document.querySelector('#tables tr.failed')")
        assert await browser.value("document.querySelector('h1').textContent") == HOSTILE
        assert printable(TABLE) in await browser.text()
        assert PUBLICATION in await browser.text()
        assert await browser.value("document.querySelectorAll('[onerror], [onload], [src=x]').length") == 0
        await act_by_keyboard(browser)
        await target_db.wait_for("SELECT subenabled FROM subscriber.subscription", False)
        await browser.wait_for("document.querySelector('#audit tbody tr')?.innerText.includes('disable')")
        await browser.wait_for(f"{BUTTONS}.includes('Enable')")
        stored = "Object.keys(localStorage).length + Object.keys(sessionStorage).length + document.cookie.length"
        assert await browser.value(stored) == 0
        assert await browser.value(f"document.documentElement.outerHTML.includes('{TOKEN}')") is False
        assert not [url for url in browser.requests.values() if TOKEN in url]
        await browser.open(f"http://127.0.0.1:{client.port}/#/nobody")
        await browser.wait_for_text("There is no subscription “nobody”")
        assert await browser.value("document.scripts.length") == 1
        files = [number for number, url in browser.requests.items() if "/console/" in url or url.endswith("/")]
        assert 10_000 < sum(browser.bytes.get(number, 0) for number in files) < PAGE_LIMIT
        # The refusal of the wrong token is the only error of the browser's console.
        assert [error for error in browser.errors if "401" not in error] == []
        assert all(url.startswith(f"http://127.0.0.1:{client.port}/") for url in browser.requests.values())
        actions = "SELECT count(*) FROM subscriber.audit"
        before = await target_db.value(actions)
        await attack_from_another_origin(browser, client.port)
        assert await target_db.value(actions) == before
        assert await target_db.value("SELECT subenabled FROM subscriber.subscription") is False
    assert first_paint < 3000  # 300 ms on a quiet machine; see test_screenshots.py
