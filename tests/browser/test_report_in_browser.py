"""The report's page in a browser: offline, on a phone, dark, printed, by keyboard."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
from conftest import HOSTILE
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.thorough

PAGES = ("real", "odd")
PLOTS = "[...document.querySelectorAll('[id^=plot-][role=img]')].filter(plot => !plot.closest('details:not([open])'))"
OPEN_ALL = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
ALL_DRAWN = "return document.documentElement.dataset.drawn === document.documentElement.dataset.plots"


@pytest.fixture(params=PAGES)
def page(request, browser, pages):
    browser.screen()
    browser.open(pages[request.param])
    return request.param


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


def test_page_draws_every_plot_without_requests_or_errors(browser, page):
    closed = browser.run(f"return {PLOTS}.length")
    browser.run(OPEN_ALL)
    browser.wait(f"return {PLOTS}.length > {closed} && {PLOTS}.every(plot => plot.querySelector('.main-svg'))")
    browser.wait(ALL_DRAWN)
    drawn = browser.run(
        f"return {PLOTS}.map(plot => ({{id: plot.id, traces: plot.data.filter(t => t.type === 'scatter').length,"
        " named: plot.data.filter(t => t.meta && t.meta.kind === 'label').length,"
        " names: plot.querySelectorAll('.scatterlayer .trace .textpoint text').length,"
        " lines: [...plot.querySelectorAll('.scatterlayer .trace')].filter(t => !t.querySelector('.textpoint') && "
        "[...t.querySelectorAll('path.js-line, path.point')].some(p => p.getBoundingClientRect().width > 0)).length,"
        " bars: [...plot.querySelectorAll('.barlayer .point path')].filter(p => p.getBoundingClientRect().width > 0).length,"
        " height: plot.querySelector('.main-svg').getBoundingClientRect().height}))"
    )
    assert (closed, len(drawn)) == {"real": (6, 14), "odd": (4, 12)}[page]
    for plot in drawn:
        assert plot["height"] > 90, plot
        if "time-shares" in plot["id"]:
            assert plot["bars"] > 2, plot
        else:
            assert plot["lines"] == plot["traces"] - plot["named"] > 1, plot
            assert plot["names"] == plot["named"], plot
    logged = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    urls = [entry["params"]["request"]["url"] for entry in logged if entry["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))] == [browser.driver.current_url]
    assert browser.driver.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 768])
def test_page_narrow_screen_scrolls_only_vertically(browser, page, width):
    browser.screen(width, 740, mobile=True)
    browser.wait(f"return {PLOTS}.every(plot => plot.querySelector('.main-svg')?.getBoundingClientRect().right <= {width})")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    wide = browser.run(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .plot') && "
        f"e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert browser.run("return getComputedStyle(document.body).fontSize") == "16px"


def test_page_and_plots_follow_colour_scheme(browser, page):
    seen = {}
    for scheme in ("light", "dark"):
        browser.screen(scheme=scheme)
        seen[scheme] = browser.run(
            "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
            "getComputedStyle(document.querySelector('.xtick text')).fill]"
        )
    paper, ink, ticks = (brightness(colour) for colour in seen["light"])
    assert paper > 0.95
    assert max(ink, ticks) < 0.3
    paper, ink, ticks = (brightness(colour) for colour in seen["dark"])
    assert paper < 0.15
    assert min(ink, ticks) > 0.7


def test_page_printed_immediately_is_complete_and_light(browser, pages):
    """The browser is never idle here, so that plots out of view are drawn for the printer alone."""
    never = browser.command("Page.addScriptToEvaluateOnNewDocument", {"source": "window.requestIdleCallback = () => 0"})
    try:
        browser.screen(scheme="dark")
        browser.open(pages["forty"], wait=False)
        browser.wait("return document.documentElement.dataset.plots")
        drawn, plots = browser.run("return [document.documentElement.dataset.drawn, document.documentElement.dataset.plots].map(Number)")
        assert drawn < plots
        printed = printed_bytes(browser)
        browser.wait("return document.documentElement.dataset.drawn === document.documentElement.dataset.plots")
        browser.wait(f"return {PLOTS}.every(plot => plot.querySelector('.main-svg').getBoundingClientRect().width <= 1280)")
        again = printed_bytes(browser)
    finally:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", never)
    assert printed > 50_000
    assert printed == pytest.approx(again, rel=0.02)
    browser.command("Emulation.setEmulatedMedia", {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    colours = browser.run("return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert [brightness(colour) for colour in colours] == [1.0, 0.0]
    assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == "none"


def printed_bytes(browser):
    """The size of the page as PDF: a plot that is missing in it makes it smaller."""
    content = base64.b64decode(browser.command("Page.printToPDF", {"printBackground": True})["data"])
    assert content.startswith(b"%PDF")
    return len(content)


def test_page_run_name_is_escaped(browser, pages):
    browser.screen()
    browser.open(pages["odd"])
    assert browser.run("return [typeof hacked, document.images.length]") == ["undefined", 0]
    assert browser.run("return document.querySelector('#run-0').textContent") == HOSTILE
    browser.run(OPEN_ALL)
    browser.wait(ALL_DRAWN)
    hover = "const plot = document.getElementById('plot-accuracy-0'); Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 1}]);"
    browser.run(f"{hover} plot.scrollIntoView()")
    browser.wait("return document.querySelector('#plot-accuracy-0 .hoverlayer text')")
    assert browser.run("return [typeof hacked, document.images.length]") == ["undefined", 0]


def test_page_infinite_losses_leave_gaps(browser, pages):
    browser.screen()
    browser.open(pages["odd"])
    pieces = "return document.querySelectorAll('#plot-loss-0 .scatterlayer .trace')[1].querySelectorAll('path.js-line').length"
    browser.wait(f"{pieces} > 0")
    assert browser.run(pieces) == 3  # updates 50 and 51 are one gap, 120 is another
    crosses = "return document.querySelectorAll('#plot-loss-0 .scatterlayer .trace')[2].querySelectorAll('path.point').length"
    assert browser.run(crosses) == 3


def test_page_keyboard_reaches_content_and_hides_runs(browser, pages):
    browser.screen()
    browser.open(pages["real"])
    body = browser.driver.find_element("css selector", "body")
    body.send_keys(Keys.TAB)
    assert browser.run("const e = document.activeElement; return [e.className, e.getBoundingClientRect().left]") == ["skip", 0]
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "content"
    box = browser.driver.find_element("css selector", "input[data-line='0']")
    lines = "return document.querySelectorAll('#plot-decision-1 path.js-line').length"
    assert browser.run(lines) == 4  # each with what leads to its name
    box.send_keys(Keys.SPACE)
    browser.wait(f"{lines} === 2")
    box.send_keys(Keys.SPACE)
    browser.wait(f"{lines} === 4")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_page_text_and_controls_have_contrast(browser, page):
    """WCAG's contrast for text: at least 4.5 to 1, in both schemes."""
    for scheme in ("light", "dark"):
        browser.screen(scheme=scheme)
        style = "getComputedStyle(document.querySelector('{}')).{}"
        colours = browser.run(
            f"return [{style.format('body', 'backgroundColor')}, {style.format('body', 'color')}, {style.format('figcaption p', 'color')}, "
            f"{style.format('nav a', 'color')}, {style.format('summary', 'color')}, {style.format('footer', 'color')}]"
        )
        paper, *inks = (luminance(colour) for colour in colours)
        assert all((max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5 for ink in inks), colours


def luminance(colour):
    linear = [
        value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(v) / 255 for v in re.findall(r"\d+", colour)[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_picture_of_the_page_has_the_colours_of_both_runs(browser, pages):
    from PIL import Image

    browser.screen(1280, 1000)
    browser.open(pages["real"])
    browser.run("document.getElementById('plot-decision-1').scrollIntoView({behavior: 'instant', block: 'center'})")
    image = Image.open(io.BytesIO(base64.b64decode(browser.command("Page.captureScreenshot", {})["data"]))).convert("RGB")
    painted = {pixel for _, pixel in image.getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= painted


@pytest.mark.parametrize(("name", "screens"), [("real", 3), ("forty", 5)])
def test_a_page_is_a_few_screens_long(browser, pages, name, screens):
    browser.screen(1280, 800)
    browser.open(pages[name])
    assert browser.run("return document.documentElement.scrollHeight") <= screens * 800
    first = browser.run("return document.querySelector('.best').getBoundingClientRect().bottom")
    assert first < 250  # the answer comes first


def test_page_link_to_closed_section_opens_it(browser, pages):
    browser.screen()
    browser.open(pages["real"])
    shown = "return document.getElementById('run-1').closest('details details').parentElement.closest('details').open"
    assert not browser.run(shown)
    browser.run("location.hash = '#run-1'")
    browser.wait(shown)
    browser.run("document.getElementById('run-1').closest('details').open = true")
    resources = "return document.querySelectorAll('#plot-resources-torch-async-0 .main-svg').length > 0"
    browser.wait(resources)
    wide = "return document.querySelector('#plot-resources-torch-async-0 .main-svg').getBoundingClientRect().width"
    assert browser.run(wide) > 900  # as wide as there is room now


def test_page_small_plots_fit_three_per_row_on_paper(browser, pages):
    browser.screen(1280, 800)
    browser.open(pages["forty"])
    browser.run("dispatchEvent(new Event('beforeprint'))")
    widths = f"{PLOTS}.filter(plot => plot.closest('.small')).map(plot => plot.querySelector('.main-svg').getBoundingClientRect().width)"
    browser.wait(f"return {widths}.every(width => width <= 215)")
    assert browser.run(f"return {widths}.length") > 3
    browser.run("dispatchEvent(new Event('afterprint'))")
