"""Draw the first screen of a report: ``first_screen.py report.html report.png``.

The page is one of `trainer report`, of real runs. Chromium and chromedriver draw its first screen, and a little more; the picture has few
colours, so that it stays small. Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTH_PIXELS, HEIGHT_PIXELS = 1280, 850
COLOURS = 64
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
DRAWN = "const drawn = document.documentElement.dataset; return Boolean(drawn.plots) && drawn.drawn === drawn.plots"
PATIENCE_SECONDS = 30.0


def main() -> None:
    """Draw the page and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        parser.error("chromium and chromedriver are needed (Debian: apt-get install chromium chromium-driver)")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(driver))
        try:
            screen = {"width": WIDTH_PIXELS, "height": HEIGHT_PIXELS, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            browser.get(arguments.page.resolve().as_uri())
            until = time.monotonic() + PATIENCE_SECONDS
            while not browser.execute_script(DRAWN):
                if time.monotonic() > until:
                    raise SystemExit(f"{arguments.page}: its plots were not drawn within {PATIENCE_SECONDS:.0f} s")
                time.sleep(0.05)
            image = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
        finally:
            browser.quit()
    drawn = Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
    drawn.quantize(COLOURS).save(arguments.picture, optimize=True)


if __name__ == "__main__":
    main()
