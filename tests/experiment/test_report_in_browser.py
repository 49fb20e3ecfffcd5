"""report.html in a browser: every section at any width, light and dark, with readable text and no warnings."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.experiment.running import TEMPLATES
from tests.experiment.test_report import SECTIONS, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# A page that shows the report in a frame of the given width, and records properties of it after loading.
FRAME = """<!doctype html><body><pre id="seen"></pre><iframe id="page" width="{width}" height="900" srcdoc="{report}">
</iframe><script>
page.onload = () => {{
  const inside = page.contentDocument, root = inside.documentElement;
  seen.textContent = JSON.stringify({{
    sections: [...inside.querySelectorAll("section, header")].filter(e => e.getBoundingClientRect().height > 0)
      .map(e => e.id),
    wide: root.scrollWidth, charts: inside.querySelectorAll("svg polyline").length,
    texts: [...inside.querySelectorAll(".plot span, .plot em, figcaption, symbol text")].map(e =>
      parseFloat(getComputedStyle(e).fontSize)),
    shrunk: [...inside.querySelectorAll("svg.tiles")]
      .filter(e => e.getBoundingClientRect().width + 1 < e.width.baseVal.value).length,
    cut: [...inside.querySelectorAll("svg.tiles, .slices")]
      .filter(e => e.getBoundingClientRect().right > e.closest("section").getBoundingClientRect().right).length,
    pictures: [...inside.images].every(i => i.naturalWidth === 12),
    page: getComputedStyle(inside.body).backgroundColor, ink: getComputedStyle(inside.body).color,
  }});
}};
</script></body>"""


@pytest.fixture(scope="module")
def halopar_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("halopar"), 4, "halopar")


def chromium(directory: Path, width: int, dark: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The result of Chromium with these arguments, in a window of this width."""
    assert CHROMIUM is not None
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={directory}/profile",
               "--enable-logging=stderr", "--hide-scrollbars", f"--window-size={width + 40},1000",
               f"--blink-settings=preferredColorScheme={0 if dark else 1}", *arguments]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_every_section_without_warnings(width, dark, halopar_run, tmp_path):
    report = html.escape((halopar_run / "report.html").read_text(), quote=True)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, report=report))
    result = chromium(tmp_path, width, dark, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri())
    warnings = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert warnings == []
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', result.stdout, re.S)[1]))
    assert seen["sections"] == SECTIONS
    assert seen["wide"] <= width and seen["charts"] == 7 and seen["pictures"]
    assert min(seen["texts"]) >= 11 and seen["shrunk"] == seen["cut"] == 0
    page, ink = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("page", "ink"))
    assert (page < ink) == dark


# The same frame alone in a window, for a screenshot.
PAGE = """<!doctype html><body style="margin:0"><iframe width="{width}" height="960" style="border:0" srcdoc="{report}">
</iframe></body>"""


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_a_screenshot_shows_page_cards_text_and_curves(width, halopar_run, tmp_path):
    report = html.escape((halopar_run / "report.html").read_text(), quote=True)
    (tmp_path / "page.html").write_text(PAGE.format(width=width, report=report))
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "report.png"
    result = chromium(tmp_path, width, False, f"--screenshot={picture}", (tmp_path / "page.html").as_uri())
    assert picture.is_file(), result.stderr
    with image.open(picture) as file:
        page = file.convert("RGB").crop((0, 0, width, 960))
    shown = {colour for _, colour in page.getcolors(page.width * page.height)}
    for name in ("page", "card", "ink", "soft", "c0", "c1"):
        assert shown & near(COLOURS[name]), f"{name} {COLOURS[name]} is not in {picture}"
    edges = {page.getpixel((x, y)) for x in (1, width - 2) for y in range(page.height)}
    assert edges <= near(COLOURS["page"]), "nothing reaches the edges of the page"


COLOURS = {
    name: tuple(bytes.fromhex(value))
    for name, value in re.findall(r"--(\w+):#(\w{6});", TEMPLATES.get_template("style.css").render().partition("@")[0])
}
"""The colours of the light page, by name."""


def near(colour: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The colours that differ by at most 1 in each channel."""
    red, green, blue = ([value - 1, value, value + 1] for value in colour)
    return {(r, g, b) for r in red for g in green for b in blue}
