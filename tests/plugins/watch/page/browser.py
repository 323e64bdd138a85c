"""A real browser for tests of the live page: Debian's chromium, driven by playwright.

A page that `opened` yields fails the test if it writes to its console, sends a request to another host or throws an
error. Waits use the common test timeout.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tests.patience import PATIENCE_S
from tests.plugins.watch.run_files import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM: Final = shutil.which("chromium")
#: The reason why the browser tests cannot run on this machine; empty if they can.
MISSING: Final = (
    "" if CHROMIUM and find_spec("playwright") else "the live page is not tried: chromium or playwright is not here"
)


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Yield one browser process for the duration of the block."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_S * 1e3)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Yield a page that is logged in to the server at `url`; `options` are those of a playwright context."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | options)
    context.set_default_timeout(PATIENCE_S * 1e3)
    context.add_cookies([{"name": "pipelinerl", "value": TOKEN, "url": url}])
    wrong: list[str] = []
    context.on("console", lambda message: wrong.append(f"console, {message.type}: {message.text}"))
    context.on("weberror", lambda thrown: wrong.append(f"thrown: {thrown.error}"))
    context.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    context.on("request", lambda sent: wrong.append(f"asked: {sent.url}") if not sent.url.startswith(url) else None)
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not wrong, wrong
