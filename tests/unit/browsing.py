"""Chromium for tests of pages: the one that $FAIRHEAD_BROWSER names, or one on the path.

Needs playwright and axe-playwright-python; without them, or without Chromium, tests are skipped unless one is named.
"""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMED = os.environ.get("FAIRHEAD_BROWSER")
BROWSER = NAMED or shutil.which("chromium") or shutil.which("chromium-browser")


def needed(name):
    """A module that must be there where a browser is demanded."""
    return __import__(name, fromlist=["_"]) if NAMED else pytest.importorskip(name)


@contextmanager
def chromium():
    if BROWSER is None:
        pytest.skip("there is no Chromium; install Debian's chromium, or name one in $FAIRHEAD_BROWSER")
    with needed("playwright.sync_api").sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened_page(browser, address):
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(address)
    yield opened
    opened.close()
    assert not said, "nothing is refused by the content security policy, and the script runs without an error"


def violations(page, scheme="light", width=1280):
    """What axe-core finds, with everything unfolded."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    found = needed("axe_playwright_python.sync_playwright").Axe().run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"], one["help"]) for one in found]


def width_of(page, width):
    """How wide the page is, with everything unfolded, in a window of a given width."""
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    return page.evaluate("document.scrollingElement.scrollWidth")
