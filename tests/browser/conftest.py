"""A real browser, and the pages that it looks at."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time

import pytest
from report_runs import make_run

HOSTILE = "<script>hacked=1<!--<img src=x onerror=hacked=1>'\"&amp;"

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """A tab of the browser."""

    def __init__(self, driver):
        self.driver = driver
        self.run = driver.execute_script
        self.command = driver.execute_cdp_cmd

    def open(self, page, wait=True):
        """Go to a page without a network, and wait until its plots are drawn."""
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.command("Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0})
        self.driver.get(page.as_uri())
        if wait:
            self.wait("const drawn = document.documentElement.dataset; return drawn.plots && drawn.drawn === drawn.plots")

    def wait(self, script, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"waited {seconds} s for {script}"
            time.sleep(0.02)

    def screen(self, width=1280, height=900, mobile=False, scheme="light"):
        self.command("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile})
        self.command("Emulation.setEmulatedMedia", {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]})


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        session = Browser(driver)
        session.command("Network.enable", {})
        session.screen()
        yield session
    finally:
        driver.quit()


def trainer(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "crosstrain.cli.main", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRAINER_CALIBRATE": "true"},
    )


def finish(*processes):
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Three reports: of two real runs, of runs with unusual records, of forty runs with repeats.

    The real runs have both backends and both modes.
    """
    folder = tmp_path_factory.mktemp("pages")
    same = ("--epochs", 2, "--out", folder / "runs", "--no-save-final")
    runs = [
        trainer("run", "--backend", "tf", "--mode", "sync", "--name", "tf-sync", *same),
        trainer("run", "--backend", "torch", "--mode", "async", "--nodes", 2, "--name", "torch-async", *same),
    ]
    try:
        finish(*runs)
    finally:
        for process in runs:
            process.kill()
    odd = [
        make_run(folder / "odd", HOSTILE, calibrated=True),
        make_run(folder / "odd", "broken", mode="async", bad=(50, 51, 120), state="failed", summary=False),
    ]
    forty = [
        make_run(folder / "forty", f"{backend}-{mode}-{batch}-{seed}", steps=40, backend=backend, mode=mode, batch_size=batch, seed=seed)
        for backend, mode, batch, seed in itertools.product(("tf", "torch"), ("sync", "async"), (5, 10, 20, 40, 80), (0, 1))
    ]
    paths = {name: folder / f"{name}.html" for name in ("real", "odd", "forty")}
    finish(trainer("report", "tf-sync", "torch-async", "--out", folder / "runs", "-o", paths["real"]))
    finish(trainer("report", *odd, "-o", paths["odd"]))
    finish(trainer("report", *forty, "-o", paths["forty"]))
    return paths
