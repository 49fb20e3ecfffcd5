"""report.html: one file with every section, which a browser shows at any width, light and dark."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import torchmn
from tests.experiment.running import experiment
from torchmn.experiment.report.charts import Curve, line_chart, ticks
from torchmn.experiment.report.confusion import confusion_matrix, png
from torchmn.experiment.report.page import TEMPLATES, _program
from torchmn.experiment.train import Request, train
from torchmn.experiment.vocabulary.load import dump, read

SECTIONS = ["summary", "curves", "metrics", "confusion", "model", "time", "experiment", "environment"]
TEXT = """
dataset: {name: toy_images, side: 12, train: 60, test: 40}
model:
  layers:
    - conv: {maps: 3, kernel: 3, activation: relu}
    - max_pool: 2
    - linear: {units: 8, activation: relu}
    - linear: 4
  cost: cross_entropy
optimizer: {name: adam, lr: 0.01}
epochs: 2
batch_size: 20
metrics: [accuracy, log_loss]
predictions: [test]
"""


def run(tmp_path: Path, ranks: int, mode: str) -> Path:
    chosen = experiment(TEXT, f"parallel.mode={mode}")
    request = Request("shapes.yaml", out=str(tmp_path / "run"), console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
    torchmn.run_threads(lambda comm: train(chosen, comm, request), ranks)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def halopar_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("halopar"), 4, "halopar")


def test_a_run_leaves_log_checkpoints_experiment_predictions_and_report(halopar_run):
    assert {path.name for path in halopar_run.iterdir()} == {
        "checkpoints", "experiment.yaml", "log.jsonl", "predictions-test.npz", "report.html",
    }  # fmt: skip
    lines = [json.loads(line) for line in (halopar_run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch" not in line] == [1, 2, 3, 4, 5, 6]
    with np.load(halopar_run / "predictions-test.npz") as file:
        accuracy = float((file["predicted"] == file["targets"]).mean())
    assert accuracy == pytest.approx([line for line in lines if "epoch" in line][-1]["test accuracy"])


def test_the_report_is_one_self_contained_file(halopar_run):
    text = (halopar_run / "report.html").read_text()
    assert re.findall(r'<(?:section|header) id="(\w+)"', text) == SECTIONS
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "<script" not in text and "@import" not in text
    assert "dashed: tile of rank 3 with halo" in text and "rank 3" in text
    counts = [int(n) for n in re.findall(r'--share:[\d.]+">(\d+)</td>', text)]
    assert sum(counts) == 40


@pytest.mark.parametrize(
    ("ranks", "mode", "words"), [(1, "datapar", "The whole model on one rank"), (2, "modelpar", "weights sharded by")]
)
def test_the_report_shows_how_the_model_is_sharded(ranks, mode, words, tmp_path):
    assert words in (run(tmp_path, ranks, mode) / "report.html").read_text()


def test_recurrent_and_nested_layers_are_written_to_the_report(tmp_path):
    changes = ("model.layers=[reshape: [12, 12], lstm: {units: 3, layers: 2}, list: [linear: 4]]", "predictions=[test]")
    chosen = experiment(TEXT, *changes)
    request = Request("shapes.yaml", out=str(tmp_path), console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
    torchmn.run_threads(lambda comm: train(chosen, comm, request), 2)
    text = html.unescape(re.search(r"<pre>(.*?)</pre>", (tmp_path / "report.html").read_text(), re.S)[1])
    assert dump(read("report.yaml", text)) == dump(chosen)


EVIL = "<script>alert('&')</script>"
IMPORTED = f"""
import torch
from torch import nn
import torchmn.experiment as experiment

class Evil(nn.Identity):
    def extra_repr(self):
        return {EVIL!r}

@experiment.register_layer("evil")
def evil(shape):
    return Evil()
"""


def test_names_from_users_are_escaped(tmp_path, monkeypatch):
    for split, count in (("train", 6), ("test", 4)):
        for name in (EVIL.replace("/", "\\"), "b"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").write_bytes(png(np.full((8, 8, 3), 20 * number, np.uint8)))
    (tmp_path / "evil_words.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    changes = (
        "imports=[evil_words]", "dataset={name: images, size: [8, 8]}", f"dataset.path={tmp_path / 'images'}",
        "model.layers=[evil, linear: 2]", "epochs=1", "predictions=[]",
    )  # fmt: skip
    request = Request(f"{EVIL.replace('/', '')}.yaml", out=str(tmp_path / "run"), console=Console(quiet=True))
    torchmn.run_threads(lambda comm: train(experiment(TEXT, *changes), comm, request), 1)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<script" not in text and "alert('" not in text
    escaped = "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;"
    assert f"<h1>{escaped}script&gt;.yaml</h1>" in text and f"<td>Evil({escaped}/script&gt;)</td>" in text
    assert f"<th>{escaped}\\script&gt;</th>" in text


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
    pictures: [...inside.images].every(i => i.naturalWidth === 12),
    page: getComputedStyle(inside.body).backgroundColor, ink: getComputedStyle(inside.body).color,
  }});
}};
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_every_section_without_warnings(width, dark, halopar_run, tmp_path):
    assert CHROMIUM is not None
    report = html.escape((halopar_run / "report.html").read_text(), quote=True)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, report=report))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
               "--enable-logging=stderr", "--virtual-time-budget=5000", f"--window-size={width + 40},1000",
               f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", frame.as_uri()]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    warnings = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert warnings == []
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', result.stdout, re.S)[1]))
    assert seen["sections"] == SECTIONS
    assert seen["wide"] <= width and seen["charts"] == 5 and seen["pictures"]
    page, ink = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("page", "ink"))
    assert (page < ink) == dark


def test_a_diverging_training_has_a_report(tmp_path):
    chosen = experiment(TEXT, "optimizer={name: sgd, lr: 1e30}")
    request = Request("shapes.yaml", out=str(tmp_path), console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
    history = torchmn.run_threads(lambda comm: train(chosen, comm, request), 2)[0].history
    assert np.isnan(history[-1]["test loss"])
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r'<(?:section|header) id="(\w+)"', text) == SECTIONS and "<b>nan</b>test loss" in text
    assert "The outputs of 40 samples are NaN" in text and "test loss: no finite number to draw" in text
    assert history[-1]["test accuracy"] == 0
    with np.load(tmp_path / "predictions-test.npz") as file:
        assert (file["predicted"] == -1).all()


def test_a_finished_training_does_not_fail_if_the_report_cannot_be_written(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *args, **kwargs: None)
        out = io.StringIO()
        request = Request("shapes.yaml", out=str(tmp_path), console=Console(file=out, width=300))
        assert torchmn.run_threads(lambda comm: train(experiment(TEXT), comm, request), 1)[0].finished
    assert "report.html cannot be written (Is a directory)" in out.getvalue()


def test_different_metrics_have_separate_charts(tmp_path):
    chosen = experiment(TEXT, "metrics={train: [accuracy, sse], test: [accuracy, log_loss]}", "epochs=1")
    request = Request("shapes.yaml", out=str(tmp_path), console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
    torchmn.run_threads(lambda comm: train(chosen, comm, request), 1)
    charts = re.findall(r'aria-label="(.*?)"', (tmp_path / "report.html").read_text())
    assert charts == [
        "loss over step", "loss, train loss, test loss over epoch", "train accuracy, test accuracy over epoch",
        "train sse over epoch", "test log_loss over epoch",
    ]  # fmt: skip


def drawn(curves: list[Curve], x_name: str, y_name: str) -> str:
    macros = TEMPLATES.get_template("charts.html").module
    return str(macros.line_chart(line_chart(curves, x_name, y_name)))


def test_every_curve_has_a_colour():
    chart = drawn([Curve(str(n), [1, 2], [n, n], n) for n in range(8)], "epoch", "many")
    assert set(re.findall(r'class="curve (c\d)"', chart)) == {f"c{n}" for n in range(6)}
    style = TEMPLATES.get_template("style.css").render()
    assert all(f".curve.c{n}" in style for n in range(6))


def test_pictures_are_png_files_with_their_pixels():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    data = png(pixels)
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and base64.b64encode(data)
    body = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    assert body == b"\0" + pixels[0].tobytes() + b"\0" + pixels[1].tobytes()


def test_the_confusion_matrix_counts_each_sample_once():
    outputs = np.array([[3, 1, 0], [0, 2, 5], [0, 9, 1], [1, 0, 0]])
    assert confusion_matrix(outputs, np.array([0, 1, 1, 2])).tolist() == [[1, 0, 0], [0, 1, 1], [1, 0, 0]]


def test_charts_cover_their_values_and_omit_nan():
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] and ticks(3, 3) == [3]
    assert ticks(-7, 94)[0] <= -7 and ticks(-7, 94)[-1] >= 94
    assert ticks(1, 3, whole=True) == [1, 2, 3] and ticks(0, 180, whole=True) == [0, 50, 100, 150, 200]
    chart = drawn([Curve("a <b>", range(5000), [float(k) for k in range(4999)] + [float("nan")])], "x", "y")
    assert "a &lt;b&gt;" in chart and "nan" not in chart
    points = re.search(r'points="([^"]*)"', chart)
    assert points is not None and len(points[1].split()) <= 800
    assert "no finite number to draw" in drawn([Curve("empty", [], [])], "x", "y")


@pytest.mark.parametrize("script", ["start.py", "main.py"])
def test_the_command_in_the_report_is_what_a_user_would_type(script):
    assert _program(str(Path(torchmn.__file__).with_name("cli") / script)) == "torchmn"
    assert _program("/somewhere/bin/torchmn") == "torchmn" and _program("/home/me/train.py") == "train.py"
