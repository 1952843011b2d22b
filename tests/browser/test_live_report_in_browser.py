"""The live page in a browser: it follows new records and keeps the reader's state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from growing_runs import GrowingRun
from report_runs import make_run

pytestmark = pytest.mark.thorough

SECONDS = 60
"""For what the page shows after a change: several times what it takes where the machine is busy."""

NOTES = "return [...document.querySelectorAll('#live-notes li')].map(e => e.textContent)"


@contextmanager
def served(*arguments):
    """`trainer report --live` and its address."""
    command = [sys.executable, "-m", "crosstrain.cli.main", "report", "--live", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
                assert process.returncode == 130, errors
                assert "Traceback" not in errors


def live(browser):
    return browser.run("return document.getElementById('live').innerText")


def wait_for_points(browser, plot, count):
    """Wait until a drawn plot's first curve ends at the x that was recorded last."""
    browser.wait(
        f"const plot = document.getElementById('{plot}'); return plot?.data && plot.data[0].x && lastOf(plot) === {count}", SECONDS
    )


@pytest.fixture
def page(browser):
    """The browser with a network, at least to this machine; its errors fail the test."""
    browser.screen()
    source = "window.lastOf = plot => { const trace = plot._fullData.find(t => t.x?.length); return trace.x[trace.x.length - 1]; }"
    added = browser.command("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.command("Network.emulateNetworkConditions", {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1})
    browser.driver.get_log("performance")
    browser.driver.get_log("browser")
    yield browser
    browser.command("Page.removeScriptToEvaluateOnNewDocument", added)
    browser.driver.get("about:blank")


def requested_paths(browser):
    """The paths that the browser has requested from the command."""
    logged = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    urls = [entry["params"]["request"]["url"] for entry in logged if entry["method"] == "Network.requestWillBeSent"]
    return [url.partition("?")[0].partition("127.0.0.1")[2].partition("/")[2] for url in urls if url.startswith("http")]


def test_live_page_new_records_keep_scroll_position(page, tmp_path):
    run = GrowingRun(tmp_path, "growing").describe().train(40).evaluate()
    with served(run.path) as (process, address):
        page.driver.get(address)
        wait_for_points(page, "plot-loss-0", 40)
        assert "Live, last refreshed at" in live(page)
        assert "one run, at work" in live(page)
        assert page.run("return document.getElementById('live').closest('header') !== null")
        page.run(
            "document.querySelector('.part details').open = true; document.querySelector('figure details').open = true;"
            "document.querySelector('.part').open = false;"
            "document.getElementById('figures').scrollIntoView({behavior: 'instant'}); window.scrollBy({top: 37, behavior: 'instant'});"
        )
        page.run("window.sameWindow = true; document.getElementById('plot-loss-0').mine = true")
        before = page.run("return [document.getElementById('figures').getBoundingClientRect().top, scrollY]")
        assert before[1] > 500
        for updates in (80, 120):
            run.train(40).evaluate()
            wait_for_points(page, "plot-loss-0", updates)
            assert page.run("return document.getElementById('figures').getBoundingClientRect().top") == pytest.approx(before[0], abs=2)
            assert page.run(
                "return [document.querySelector('.part details').open, document.querySelector('figure details').open,"
                " document.querySelector('.part').open, window.sameWindow, document.getElementById('plot-loss-0').mine]"
            ) == [True, True, False, True, True]
        run.end()
        page.wait("return document.getElementById('live-end').textContent.startsWith('All runs have ended')", SECONDS)
        page.wait("return document.querySelector('main section strong').textContent === 'succeeded'", SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        page.wait("return document.getElementById('live-end').textContent === 'No longer refreshed: the command has ended.'", SECONDS)
        assert "No longer live, last refreshed at" in live(page)
    paths = requested_paths(page)
    assert [paths.count(path) for path in ("", "live.js", "script-0.js", "script-1.js")] == [1, 1, 1, 1]
    assert paths.count("page") >= 3
    complaints = [entry["message"] for entry in page.driver.get_log("browser")]
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []


def test_live_page_new_run_is_added(page, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    runs = []
    with served(folder) as (_, address):
        page.driver.get(address)
        page.wait(f"{NOTES}.some(text => text.endsWith('there is no run in it yet'))", SECONDS)
        runs.append(GrowingRun(folder, "second"))
        runs[0].describe()
        page.wait("return document.querySelector('h1').textContent === 'Run second'", SECONDS)
        runs[0].train(40).evaluate()
        wait_for_points(page, "plot-loss-0", 40)
        first = make_run(folder, "first", steps=80)
        page.wait("return document.querySelectorAll('input[data-line]').length === 2", SECONDS)
        labels = "return [...document.querySelectorAll('input[data-line]')].map(e => [e.closest('label').textContent.trim(), e.checked])"
        assert page.run(labels) == [["first", True], ["second", True]]
        page.run("document.querySelector('input[data-line=\"1\"]').click()")
        heading = "document.getElementById('figures')"
        page.run(f"{heading}.scrollIntoView({{behavior: 'instant'}}); window.scrollBy({{top: 21, behavior: 'instant'}})")
        top, scrolled = page.run(f"return [{heading}.getBoundingClientRect().top, scrollY]")
        make_run(folder, "another", steps=80, batch_size=20)
        page.wait("return document.querySelectorAll('input[data-line]').length === 3", SECONDS)
        assert page.run(labels) == [["global batch 20", True], ["global batch 40", True], ["second", False]]
        assert page.run(f"return {heading}.getBoundingClientRect().top") == pytest.approx(top, abs=2)
        assert page.run("return scrollY") > scrolled + 200  # the content above it has a conclusion and another picture now
        shown = "document.getElementById('plot-loss-0').data.filter(t => t.visible && t.meta.kind === 'line').map(t => t.meta.line)"
        page.wait(f"return JSON.stringify({shown}) === '[0,1]'", SECONDS)
        (first / "system.jsonl").write_text('{"schema":1}\n{"schema":1}\n')
        page.wait(f"{NOTES}.some(text => text.startsWith('first is skipped: ') && text.includes('not a SystemRecord'))", SECONDS)
        page.wait("return document.querySelectorAll('input[data-line]').length === 2", SECONDS)
        assert page.run(labels) == [["another", True], ["second", False]]
    for run in runs:
        run.close()


def test_live_page_text_of_run_is_escaped(page, tmp_path):
    hostile = "<img src=x onerror=hacked=1><script>hacked=1</script>"
    run = GrowingRun(tmp_path, hostile.replace("/", "")).describe().train(8)
    with served(tmp_path) as (_, address):
        page.driver.get(address)
        wait_for_points(page, "plot-loss-0", 8)
        run.end("failed", cause=hostile)
        page.wait("return document.querySelector('main section strong').textContent === 'failed'", SECONDS)
        assert page.run("return [typeof hacked, document.images.length]") == ["undefined", 0]
        injected = "<img src=x onerror=hacked=1>"
        page.run(f"document.body.append(Object.assign(document.createElement('div'), {{innerHTML: '{injected}'}}))")
        page.wait("return document.images[0].complete")
        assert page.run("return typeof hacked") == "undefined"
