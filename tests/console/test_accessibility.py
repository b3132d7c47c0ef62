"""The console for everybody: WCAG 2.2 AA in light and dark, each control by keyboard, and the time that it costs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import process_time
from typing import Any

import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.console.observer import Observer
from subscriber.settings import Settings
from tests.cache import cache_directory, fill
from tests.cli.test_http import FREE, Client, served
from tests.console.browser import CHROMIUM, MISSING, Browser, Chromium, opened_tab
from tests.console.test_actions import TOKENS
from tests.console.test_browser import BUTTON, BUTTONS, PAINT
from tests.matrix.programs import NotAvailable, fetch_package
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber

in_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
pytestmark = pytest.mark.xdist_group("browser")

AXE, AXE_SHA512 = (
    "axe-core@4.14.1",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN_AXE = f"axe.run(document, {{runOnly: {json.dumps(RULES)}}})"
FOUND = ".then((found) => found.violations.flatMap((rule) => rule.nodes.map((node) => [rule.id, node.html])))"
# Work of the same processor with which times are compared: no test depends on its speed.
LOOP = "(() => { let sum = 0; for (let i = 0; i < 3e7; i++) sum = (sum * 31 + i) | 0; return sum; })()"
FIRST_PAINT = 1  # such loops
CONNECTIONS = 12  # connections with a query, for a snapshot of an open page

# All controls that the page shows, and the one that has the focus, by their place in the document.
CONTROLS = """
[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
    .filter((one) => !one.disabled && one.checkVisibility() && !one.closest('dialog:not([open])'))
"""
FOCUS = f"({CONTROLS}).indexOf(document.activeElement)"
RING = "(({outlineStyle, outlineWidth}) => outlineStyle !== 'none' && outlineWidth !== '0px')"
HAS_RING = f"{RING}(getComputedStyle(document.activeElement))"


@pytest.fixture(scope="module")
def axe() -> str:
    """The text of axe-core, which npm fetches."""
    try:
        place = fill(cache_directory("axe") / AXE, partial(fetch_package, AXE, AXE_SHA512))
    except NotAvailable as error:
        pytest.skip(str(error))
    return (place / "package" / "axe.min.js").read_text()


@asynccontextmanager
async def console(
    source: Database, target: Database, subscriber: Subscriber, chromium: Chromium
) -> AsyncIterator[tuple[Client, Browser]]:
    """Open the page of two subscriptions, one of which cannot copy a table."""
    for database in (source, target):
        await database.execute("CREATE TABLE good (a int PRIMARY KEY)", "CREATE TABLE bad (a int PRIMARY KEY)")
    await source.execute("INSERT INTO bad VALUES (1)", "CREATE PUBLICATION good FOR TABLE good")
    await source.execute("CREATE PUBLICATION bad FOR TABLE bad")
    await target.execute("INSERT INTO bad VALUES (1)")
    await subscriber.create(source, "good", "good", slot_name="good")
    await subscriber.create(source, "bad", "bad", slot_name="bad")
    async with served(subscriber, target.dsn(), FREE, tokens=TOKENS) as client, opened_tab(chromium) as browser:
        await browser.open(f"http://127.0.0.1:{client.port}/")
        await browser.wait_for("document.querySelector('.summary.tone-wrong .problem')")
        yield client, browser


async def show_subscription(browser: Browser) -> None:
    await browser.value("location.hash = '#/bad'")
    await browser.wait_for("document.querySelector('#tables tr.failed')")
    await browser.wait_for(f"{BUTTONS}.length > 0")


async def violations(browser: Browser, axe: str) -> list[Any]:
    await browser.value(f"if (!globalThis.axe) {{ {axe} }}; true")
    problems: list[Any] = await browser.value(RUN_AXE + FOUND)
    return problems


@in_browser
async def test_axe_finds_no_violation(
    source_db: Database, target_db: Database, subscriber: Subscriber, chromium: Chromium, axe: str
) -> None:
    by_page: dict[str, list[Any]] = {}
    async with console(source_db, target_db, subscriber, chromium) as (_, browser):
        for theme in ("light", "dark"):
            await browser.size(1240, 800, dark=theme == "dark")
            by_page[f"overview, {theme}"] = await violations(browser, axe)
            await show_subscription(browser)
            by_page[f"subscription, {theme}"] = await violations(browser, axe)
            await browser.value(f"{BUTTON}('Sign in to act')?.click()")
            await browser.wait_for("document.getElementById('dialog').open")
            by_page[f"dialog, {theme}"] = await violations(browser, axe)
            await browser.press("Escape", 27)
            await browser.value("location.hash = '#/'")
            await browser.wait_for("document.querySelector('.summary .who')")
        await browser.size(390, 800)
        by_page["overview, phone"] = await violations(browser, axe)
        await show_subscription(browser)
        by_page["subscription, phone"] = await violations(browser, axe)
    assert {place: nodes for place, nodes in by_page.items() if nodes} == {}


async def walk(browser: Browser) -> None:
    """Press Tab from the first control on: each has the focus once, in the order of the page, and with a ring."""
    await browser.value(f"({CONTROLS})[0].focus()")
    seen = [0]
    for _ in range(200):
        await browser.press("Tab", 9)
        if (at := await browser.value(FOCUS)) <= 0:
            break
        seen.append(at)
        assert await browser.value(HAS_RING), await browser.value("document.activeElement.outerHTML")
    controls = await browser.value(f"({CONTROLS}).map((one) => one.outerHTML)")
    assert seen == list(range(len(controls))), controls
    assert len(seen) > 3


@in_browser
async def test_each_control_is_reached_by_keyboard(
    source_db: Database, target_db: Database, subscriber: Subscriber, chromium: Chromium
) -> None:
    async with console(source_db, target_db, subscriber, chromium) as (_, browser):
        await walk(browser)
        await show_subscription(browser)
        await walk(browser)
        # A dialog keeps the focus, and returns it.
        await browser.value(f"{BUTTON}('Sign in to act').focus()")
        await browser.press("Enter", 13)
        await browser.wait_for("document.activeElement.id === 'token'")
        for _ in range(6):
            await browser.press("Tab", 9)
            outside = "document.activeElement !== document.body && !document.activeElement.closest('#dialog')"
            assert await browser.value(outside) is False
        await browser.press("Escape", 27)
        await browser.wait_for("!document.getElementById('dialog').open")
        assert await browser.value("document.activeElement.textContent") == "Sign in to act"


async def processor_time(browser: Browser) -> float:
    """Return the seconds that the page's main thread has worked."""
    measured = await browser.call("Performance.getMetrics")
    return next(float(metric["value"]) for metric in measured["metrics"] if metric["name"] == "TaskDuration")


@in_browser
async def test_the_first_paint_costs_little(
    source_db: Database, target_db: Database, subscriber: Subscriber, chromium: Chromium
) -> None:
    """Processor time, which other work on the machine does not change. The soak has the time that a person waits."""
    async with console(source_db, target_db, subscriber, chromium) as (client, browser):
        await browser.call("Performance.enable", timeDomain="threadTicks")
        await browser.open("about:blank")
        await browser.open(f"http://127.0.0.1:{client.port}/")
        await browser.wait_for(PAINT)
        await browser.wait_for("document.querySelector('.summary')")
        paint = await processor_time(browser)  # since its renderer has started
        await browser.value(LOOP)
        loop = await processor_time(browser) - paint
        assert paint < FIRST_PAINT * loop


@pytest.mark.soak  # a time that other work on the machine changes
@in_browser
async def test_the_first_paint_comes_soon(
    source_db: Database, target_db: Database, subscriber: Subscriber, chromium: Chromium
) -> None:
    async with console(source_db, target_db, subscriber, chromium) as (client, browser):
        seconds = []
        for _ in range(5):
            await browser.open("about:blank")
            await browser.open(f"http://127.0.0.1:{client.port}/")
            await browser.wait_for(PAINT)
            seconds.append(await browser.value(PAINT))
        assert min(seconds) < 300  # milliseconds


async def test_an_open_page_costs_the_worker_little(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute(*(f"CREATE TABLE t{number} (a int PRIMARY KEY)" for number in range(50)))
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", copy_data=False)
    await subscriber.wait_for_ready(source_db)
    await subscriber.stop()  # so that the process does nothing else
    observer = Observer(target_db.dsn(), Settings(http_max_age=0))

    async def connection() -> None:
        async with CatalogConnection.open(target_db.dsn(), "test") as catalog, catalog.use() as session:
            await session.fetch("SELECT oid, relname FROM pg_class LIMIT 50")

    with observer.watched("s"):
        snapshot = await least_time(partial(observer.see, "s"))
    reference = await least_time(connection)
    assert snapshot < CONNECTIONS * reference


async def least_time(action: Callable[[], Awaitable[object]]) -> float:
    """Return the processor time of an action. Other processes make each attempt dearer, and none cheaper."""
    await action()  # the imports
    costs = []
    for _ in range(20):
        began = process_time()
        await action()
        costs.append(process_time() - began)
    return min(costs)
