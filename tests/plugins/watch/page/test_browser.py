"""The live page in a real browser: each screen, for a killed and a live run, by mouse and keyboard.

No test sleeps for a fixed time: each action waits until the action before it has had its effect.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Final

import pytest

from pipelinerl.observability.events import EventLog
from tests.fakes.live_run import endless_run, launched
from tests.observability.synthetic import events
from tests.patience import PATIENCE_S
from tests.plugins.watch.page.browser import MISSING, a_browser, opened
from tests.plugins.watch.page.hostile_run import HOSTILE, hostile_run, long_silent
from tests.plugins.watch.page.steered_run import steered_run
from tests.plugins.watch.run_files import keep, loaded, of_episode, served_page, write, written_run

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
playwright = pytest.importorskip("playwright.sync_api", reason=MISSING)
expect = playwright.expect

STEPS: Final = 12
SCREENS: Final = ("now", "steer", "timeline", "samples", "compare", "recipe")
#: JavaScript that counts the visible texts and controls, and finds those with a contrast below 4.5 (WCAG 2, relative
#: luminance) to their background.
CONTRASTS: Final = """() => {
  const channels = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = (colour) => colour.slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(channels(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const texts = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) if (walker.currentNode.data.trim()) texts.add(walker.currentNode.parentElement);
  const controls = document.querySelectorAll("input:not([type=range], [type=checkbox]), select");
  controls.forEach((each) => texts.add(each));
  const seen = [...texts].filter((each) => each.getClientRects().length && !each.closest("option, .said"));
  const low = seen.map((each) => {
    const ground = behind(each);
    const [a, b] = [light(over(channels(getComputedStyle(each).color), ground)), light(ground)];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), each.className, each.textContent.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
  return { seen: seen.length, low };
}"""

#: JavaScript that returns "" if the focused element shows an outline, and the element's HTML otherwise.
UNSEEN_FOCUS: Final = """() => {
  const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
  return outlineStyle !== "none" && parseFloat(outlineWidth) >= 1 ? "" : document.activeElement.outerHTML.slice(0, 200);
}"""

#: JavaScript expression for the step number that the page shows.
STEP: Final = "Number(document.querySelector('.facts').textContent.match(/step ([\\d,]+)/)[1].replaceAll(',', ''))"

#: JavaScript that makes the page behave as if its tab were hidden or visible.
VISIBILITY: Final = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""

#: JavaScript that returns the page's last 20 requests: address, start and end in ms since page load, and HTTP status.
ASKED: Final = """() => performance.getEntriesByType("resource").slice(-20)
  .map((each) => [each.name, Math.round(each.startTime), Math.round(each.responseEnd), each.responseStatus])"""

#: JavaScript that returns true if anything is drawn on the canvas.
DRAWN: Final = """(canvas) => {
  const { width, height } = canvas;
  return width > 0 && canvas.getContext("2d").getImageData(0, 0, width, height).data.some((each) => each > 0);
}"""


@pytest.fixture(scope="module")
def browser():
    with a_browser() as one:
        yield one


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a killed run as number 0 and a hostile run as number 1."""
    folder = tmp_path_factory.mktemp("browser")
    killed = long_silent(written_run(folder / "killed", steps=STEPS, end=False))
    with served_page(killed, hostile_run(folder / "hostile")) as served:
        for run in (0, 1):
            loaded(served, run)
        yield served


@contextmanager
def troubled(browser, server):
    """Yield a logged-in page for tests that cause errors on purpose: what it writes to its console is not checked."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_S * 1e3)
    context.add_cookies([{"name": "pipelinerl", "value": server.http.cookies["pipelinerl"], "url": server.url}])
    try:
        yield context.new_page()
    finally:
        context.close()


def go(page, url, screen):
    """Open a screen by its permanent link and wait for its content."""
    page.goto(f"{url}/#/{screen}")
    shown(page, screen.split("/")[0].split("?")[0])


def shown(page, screen):
    """Wait for content that only this screen shows, and that it shows only once it has data."""
    main = page.locator("main")
    wanted = {
        "now": lambda: main.get_by_role("img", name=re.compile("^Gradient norm over step; newest: grad norm 0")),
        "steer": lambda: main.get_by_role("slider").first,
        "timeline": lambda: main.get_by_role("region", name="Lanes").get_by_role("cell", name="trainer").first,
        "samples": lambda: main.get_by_role("link", name=re.compile("^Group of the answer")).first,
        "group": lambda: main.get_by_role("article", name="Answer 1"),
        "tokens": lambda: main.get_by_role("button", pressed=True).first,
        "recipe": lambda: main.get_by_role("heading", name="staleness", exact=True),
        "compare": lambda: main.get_by_role("heading", name="Recipe differences"),
    }
    try:
        wanted[screen]().wait_for()
    except playwright.TimeoutError as error:
        calls = page.evaluate(ASKED)
        raise AssertionError(f"{screen} did not come; it shows\n{main.inner_text()}\nand has sent {calls}") from error


def group_of(server, run=0, **query):
    """Return the permanent id of a group that has tokens."""
    samples = server.get("/api/samples", run=run, kind="any", **query)["samples"]
    return str(next(each["group"] for each in samples if each["has_tokens"]))


def every_screen(server):
    group = group_of(server)
    colours = ("version", "delta", "advantage", "entropy", "mask")
    return [*SCREENS, f"group/{group}", *(f"tokens/{group}/0?by={each}" for each in colours)]


def test_every_screen_of_the_live_page_shows_the_data_of_a_killed_run(browser, server):
    with opened(browser, server.url) as page:
        for screen in every_screen(server):
            go(page, server.url, screen)
            expect(page.locator("main")).to_contain_text("ended unexpectedly")
        go(page, server.url, "now")
        expect(page.locator("main")).to_contain_text("short_words")
        assert page.locator(".chart canvas").first.evaluate(DRAWN)
        go(page, server.url, "timeline")
        page.wait_for_function(f"(canvas) => ({DRAWN})(canvas)", arg=page.locator("main canvas").element_handle())
        go(page, server.url, "steer")
        expect(page.get_by_role("slider").first).to_be_disabled()
        expect(page.get_by_role("region", name="Changes of knobs")).to_contain_text("cli")


def test_samples_screen_filters_and_sorts_samples_and_its_links_stay_valid(browser, server):
    with opened(browser, server.url) as page:
        go(page, server.url, "samples")
        rows = page.get_by_role("region", name="Samples").locator("tbody tr")
        expect(rows).to_have_count(2 * STEPS)
        page.get_by_label("groups").select_option("without")
        expect(rows).to_have_count(STEPS)
        expect(page.locator("tr.nosignal")).to_have_count(STEPS)
        page.get_by_label("groups").select_option("")
        page.get_by_role("button", name="length").click()
        expect(page.get_by_role("columnheader", name="length")).to_have_attribute("aria-sort", "descending")
        expect(rows.first).to_contain_text("7")
        page.reload()  # keeps the filter and the sort order, because the page's address contains them
        expect(page.get_by_role("columnheader", name="length")).to_have_attribute("aria-sort", "descending")
        rows.first.get_by_role("link").click()
        shown(page, "group")
        page.get_by_role("link", name="Tokens").click()
        shown(page, "tokens")
        tokens = page.get_by_role("group", name=re.compile("^Tokens"))
        expect(tokens).to_have_text("<bos>sayab<eos>")
        expect(tokens.locator(".prompt")).to_have_text(["<bos>", "say", "b"])
        with_entropy, without = (group_of(server, step=step) for step in (STEPS - 1, STEPS))
        go(page, server.url, f"tokens/{with_entropy}/0?by=entropy")
        page.get_by_role("group", name=re.compile("^Tokens")).locator(".other2").click()
        expect(page.locator("main .tip")).to_contain_text("entropy 0.75")
        go(page, server.url, f"tokens/{without}/0")
        expect(page.get_by_role("button", name="entropy")).to_be_disabled()
        expect(page.locator("main")).to_contain_text("Entropy was not measured here")


def test_episode_is_shown_as_a_tree_of_turns_and_its_environment_metrics_are_shown(browser, tmp_path):
    run = written_run(tmp_path / "run", steps=3)
    keep(run, [of_episode(3)], name="episodes")
    with served_page(run) as served:
        loaded(served)
        samples = served.get("/api/samples", kind="any")["samples"]
        (episode,) = [each["group"] for each in samples if "let me look" in each["text"]]
        with opened(browser, served.url) as page:
            go(page, served.url, "now")
            figures = page.get_by_role("region", name="Environments").locator("tbody tr")
            expect(figures).to_have_count(1)
            assert figures.locator("td").all_inner_texts() == ["short_words", "2.5", "1.5", "250 ms", "120", "9", "3"]
            page.goto(f"{served.url}/#/group/{episode}")
            turns = page.get_by_role("region", name="Turns of answer 0")
            expect(turns.locator("ul.turns ul.turns section")).to_have_count(1)
            expect(turns.locator("ul.turns ul.turns")).to_contain_text("segment 2: continues turn 1 (forked)")
            expect(turns).to_contain_text("turn 4, planner, 2 tokens")


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 3840)])
def test_screens_are_not_wider_than_the_window_and_their_texts_have_enough_contrast(browser, server, scheme, width):
    with opened(browser, server.url, color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
        for screen in every_screen(server):
            go(page, server.url, screen)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, screen
            contrasts = page.evaluate(CONTRASTS)
            assert contrasts["low"] == [] and contrasts["seen"] > 20, (screen, contrasts)
        page.get_by_role("button", name=re.compile("^Use .* colours$")).click()
        other = "dark" if scheme == "light" else "light"
        page.wait_for_function(f"document.documentElement.dataset.theme === '{other}'")
        assert page.evaluate(CONTRASTS)["low"] == []


def tab_to(page, reached):
    """Press Tab until `reached` holds for the focused element; every element on the way must show its focus."""
    for _ in range(150):
        page.keyboard.press("Tab")
        assert page.evaluate(UNSEEN_FOCUS) == ""
        if page.evaluate(f"(() => {{ const at = document.activeElement; return {reached}; }})()"):
            return
    raise AssertionError(f"no Tab leads to {reached}")


def test_every_screen_is_reachable_by_keyboard(browser, server):
    with opened(browser, server.url) as page:
        shown(page, "now")
        tab_to(page, "at.className === 'skip'")
        page.keyboard.press("Enter")
        page.wait_for_function("document.activeElement.id === 'main'")
        page.reload()
        shown(page, "now")
        tab_to(page, "at.textContent === 'Samples'")
        page.keyboard.press("Enter")
        shown(page, "samples")
        page.wait_for_function("document.activeElement.id === 'main'")
        tab_to(page, "at.getAttribute('aria-label')?.startsWith('Group of the answer')")
        page.keyboard.press("Enter")
        shown(page, "group")
        tab_to(page, "at.textContent === 'Tokens'")
        page.keyboard.press("Enter")
        shown(page, "tokens")
        tab_to(page, "at.textContent === 'table'")
        tab_to(page, "at.classList.contains('tokens')")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(page.locator("main .tip")).to_contain_text("token 2: id 7")
        go(page, server.url, "timeline")
        tab_to(page, "at.tagName === 'CANVAS'")
        span = page.get_by_role("heading", name=re.compile("^In this window")).inner_text()
        page.keyboard.press("+")
        expect(page.get_by_role("heading", name=re.compile("^In this window"))).not_to_have_text(span)


def test_page_shows_new_steps_and_requests_nothing_while_hidden(browser, tmp_path):
    run_dir = written_run(tmp_path / "live", steps=40, end=False)
    last = next(event for event in reversed(events(40)) if event["kind"] == "step")
    with served_page(run_dir) as server, EventLog(run_dir / "events.jsonl") as log:
        loaded(server)
        with opened(browser, server.url) as page:

            def taken(step, norm):
                write(log, last | {"step": step, "grad_norm": norm})
                return page.get_by_role("img", name=re.compile(f"^Gradient norm over step; newest: grad norm {norm}"))

            shown(page, "now")
            page.locator("[data-heard=open]").wait_for()
            taken(41, 9.5).wait_for()
            taken(30, 1.5).wait_for()  # the run resumes: step 30 voids the later steps
            requests = []
            page.on("request", lambda sent: requests.append(sent.url))
            with page.expect_event("requestfailed", lambda sent: "/api/stream" in sent.url):
                page.evaluate(VISIBILITY, True)
            requests.clear()
            hidden = taken(43, 7.5)
            while server.runs[0].view.step != 43:  # bounded by the test's time limit
                page.wait_for_timeout(20)
            assert requests == []
            page.evaluate(VISIBILITY, False)
            hidden.wait_for()


def test_page_reconnects_its_stream_retries_failed_requests_and_asks_for_a_link_once_it_has_no_cookie(browser, server):
    with troubled(browser, server) as page:
        page.route("**/api/stream*", lambda route: route.abort())
        page.goto(server.url)
        page.locator("[data-heard=lost]").wait_for()
        page.unroute_all()
        page.locator("[data-heard=open]").wait_for()
        page.route("**/api/samples*", lambda route: route.abort())
        page.goto(f"{server.url}/#/samples")
        page.get_by_role("alert").get_by_text("does not answer").wait_for()
        page.unroute_all()  # the retry must not wait for an event: the stream is open, but sends nothing
        shown(page, "samples")
        page.get_by_role("alert").wait_for(state="detached")
        page.context.clear_cookies()
        page.goto(f"{server.url}/#/compare")
        page.get_by_role("alert").filter(has_text="open the link that").first.wait_for()


def test_page_opened_by_an_expired_link_lets_the_user_enter_a_newer_link(browser, server):
    used = server.keys[-1]
    server.http.get(f"/?key={used}")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{server.url}/?key={used}")
        page.get_by_role("heading", name="This page needs a key").wait_for()
        assert page.evaluate(CONTRASTS)["low"] == []
        page.get_by_label("Newest link").fill(f"{server.url}/?key={server.keys[-1]}")
        page.get_by_role("button", name="Open").click()
        shown(page, "now")
        assert "key=" not in page.url
    finally:
        context.close()


def test_charts_can_be_smoothed_and_show_the_value_at_the_pointer(browser, server):
    with opened(browser, server.url) as page:
        go(page, server.url, "now")
        figure = page.locator("figure").filter(has_text="Gradient norm")
        newest = figure.locator("b").inner_text()
        page.get_by_label("smoothing").select_option("5")
        expect(figure.locator("b")).not_to_have_text(newest)
        assert "smooth=5" in page.url
        figure.locator("canvas").hover()
        expect(figure.locator("b")).to_contain_text("at step")
        # All charts show their value at the pointer's step, not only the one under the pointer.
        expect(page.locator("figure").filter(has_text="Loss").locator("b")).to_contain_text("at step")
        box = figure.locator("canvas").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60)
        expect(figure.locator(".choice")).to_be_visible()
        page.mouse.up()
        expect(figure.locator(".choice")).to_be_hidden()


def test_hostile_texts_are_displayed_by_the_live_page_and_never_executed(browser, server):
    assert len(HOSTILE) == len(set(HOSTILE)) == 200
    group = group_of(server, 1)
    screens = [*SCREENS, f"group/{group}", f"tokens/{group}/0", f"tokens/{group}/0?as=table"]
    with opened(browser, server.url) as page:
        page.evaluate("() => { window.pwned = (number) => { (window.hit ??= []).push(number); }; }")
        made = (
            "document.querySelectorAll('main :is(script, iframe, object, embed, style, link, base, svg, math)').length"
        )
        for screen in screens:
            go_on(page, screen + ("&" if "?" in screen else "?") + "run=1")
            expect(page.locator("main")).to_contain_text("pwned(")
            assert page.evaluate("window.hit ?? []") == [] and page.evaluate(made) == 0, screen
        go_on(page, f"tokens/{group}/0?run=1")
        drawn = page.locator("main .tokens span")
        expect(drawn).to_have_count(len(HOSTILE))
        plain = {"\u202e": "\\u202e", "\x00": "\\x00", "\u2028": "\\u2028"}
        assert drawn.all_text_contents() == [text.translate(str.maketrans(plain)) for text in HOSTILE]


def go_on(page, screen):
    """Open a screen without loading a new document, so that effects of hostile text persist."""
    page.evaluate("(hash) => { location.hash = hash; }", f"#/{screen}")
    shown(page, screen.split("/")[0].split("?")[0])


def test_slider_changes_the_staleness_bound_k_of_a_live_controller(browser, tmp_path):
    with steered_run(tmp_path / "run") as run:
        run.takes(1)
        with served_page(run.directory) as server, opened(browser, server.url) as page:
            k_is_moved_to_6(page, server)
            assert any(event["changes"].get("k") == 6 for event in run.events("knobs"))
            run.takes(2)
            page.wait_for_function(f"() => {STEP} === 2")  # the event stream pushes the step to the page
    with served_page(long_silent(run.directory)) as server, opened(browser, server.url) as page:
        go(page, server.url, "steer")
        expect(page.locator("main")).to_contain_text("ended unexpectedly")
        slider = page.get_by_role("slider", name="k, slider", exact=True)
        expect(slider).to_have_attribute("aria-valuetext", "6 versions")


def k_is_moved_to_6(page, server):
    """Move k from 4 to 6 on the steering screen, then return to the first screen."""
    go(page, server.url, "steer")
    apply = page.get_by_role("button", name="Apply")
    warmer = page.get_by_role("textbox", name="temperature")
    warmer.fill("-1")
    expect(page.locator("form .why")).to_contain_text("temperature must be")  # the page rejects -1 without a request
    expect(apply).to_be_disabled()
    page.get_by_role("button", name="Undo").click()
    slider = page.get_by_role("slider", name="k, slider", exact=True)
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    apply.click()
    expect(page.get_by_role("form", name="Knobs")).to_contain_text("Accepted: k = 6")
    expect(page.get_by_role("region", name="Changes of knobs")).to_contain_text("k = 6")
    expect(page.get_by_role("region", name="Engines").locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="Now").click()
    shown(page, "now")


@pytest.mark.slow  # starts four processes in sequence; the faster test_steering covers the requests to the server
def test_engines_can_be_added_swapped_drained_and_removed_in_a_live_run(browser, tmp_path):
    directory = tmp_path / "runs" / "fleet"
    with launched(endless_run(directory), directory) as run:
        run.until_step(1)
        with served_page(directory) as server, opened(browser, server.url) as page:
            go(page, server.url, "steer")
            rows = page.get_by_role("region", name="Engines").locator("tbody tr")
            expect(rows).to_have_count(1)
            starting = page.get_by_role("form", name="Start engines")
            starting.get_by_role("combobox").select_option("bigram")
            starting.get_by_role("button", name="Add").click()
            expect(page.locator("main")).to_contain_text("Requested: engine-1")
            expect(rows.filter(has_text="engine-1").locator(".pill")).to_have_text("healthy")
            rows.filter(has_text="engine-1").get_by_role("button", name="Swap").click()
            rows.filter(has_text="engine-1").get_by_role("combobox").select_option("bigram")
            page.get_by_role("button", name="Yes, swap").click()
            expect(page.locator("main")).to_contain_text("Replacing engine-1: engine-2")
            expect(rows.filter(has_text="engine-2").locator(".pill")).to_have_text("healthy")
            expect(rows.filter(has_text="engine-1").locator(".pill")).to_have_text("left")
            expect(rows.filter(has_text="engine-1").get_by_role("button")).to_have_count(0)
            expect(page.locator("main")).not_to_contain_text("Starting:")
            page.get_by_role("button", name="Drain engine-0").click()
            page.get_by_role("button", name="No", exact=True).click()
            expect(rows.filter(has_text="engine-0").locator(".pill")).to_have_text("healthy")  # no request was sent
            page.get_by_role("button", name="Drain engine-0").click()
            page.get_by_role("button", name="Yes, drain").click()
            expect(rows.filter(has_text="engine-0").locator(".pill")).to_have_text("left")
            page.get_by_role("button", name="Remove engine-2").click()
            page.get_by_role("button", name="Yes, remove").click()
            expect(rows.filter(has_text="engine-2").locator(".pill")).to_have_text("left")
            kinds = [event["kind"] for event in run.events()]
            assert kinds.count("engine_joined") == 3 and kinds.count("engine_lost") == 3, run.story()
