"""report.html: one file with every section, which a browser shows at any width, light and dark."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import subprocess
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import torchmn
from tests.experiment.running import TEMPLATES, Request, experiment, read
from tests.experiment.running import train_from_file as train
from torchmn.experiment import dump
from torchmn.experiment.report.charts import Curve, Lines, line_chart, ticks
from torchmn.experiment.report.confusion import confusion_matrix, png
from torchmn.experiment.report.history import best_epoch
from torchmn.experiment.report.page import duration, program
from torchmn.experiment.run.run_directory import commit_of

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
    assert not re.findall(r'(?:src|href)="(?!data:|#tiles)', text) and "<script" not in text and "@import" not in text
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
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r'aria-label="(.*?)"', text) == [
        "loss of each step over step", "loss, train loss, test loss over epoch",
        "train accuracy, test accuracy over epoch", "train sse over epoch", "test log_loss over epoch",
        "learning rate over epoch", "gradient norm over epoch",
    ]  # fmt: skip
    assert re.findall(r'<i(.*?) style="left:0.00%', text)[0] == "", "values of the first epoch are at its right"
    assert 'class="left"' in text, "and those of the last at its left, inside the page"
    accuracies = re.search(r'aria-label="train accuracy, test accuracy.*?</figure>', text, re.S)[0]
    assert re.findall(r'class="y".*?>(.*?)<', accuracies)[0].endswith("%")
    assert re.search(r'<b>epoch 1<em class="key c0">train accuracy [\d.]+%</em><em', accuracies)


def drawn(curves: list[Curve], **options) -> str:
    macros = TEMPLATES.get_template("charts.html").module
    return str(macros.line_chart(line_chart(Lines("several", "epoch", curves, **options))))


def test_every_curve_has_a_colour():
    chart = drawn([Curve(str(n), [1, 2], [n, n], n) for n in range(8)])
    assert set(re.findall(r'class="curve (c\d)"', chart)) == {f"c{n}" for n in range(6)}
    style = TEMPLATES.get_template("style.css").render()
    assert all(f".c{n} {{" in style for n in range(6))


def test_values_are_shown_while_the_pointer_is_over_their_place():
    curves = [Curve("a", [1, 2, 3, 4], [0.5, 0.25, float("nan"), 1], 0), Curve("b", [1, 3], [0.125, 1], 1)]
    shown = line_chart(Lines("several", "epoch", curves, percent=True)).readings
    assert [reading.title for reading in shown] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert shown[0].values == [(0, "a", "50.00%"), (1, "b", "12.50%")] and shown[2].values == [(1, "b", "100.00%")]
    places = [reading.left + reading.width * reading.place / 100 for reading in shown]
    assert places == pytest.approx([0, 100 / 3, 200 / 3, 100])
    assert shown[0].left == 0 and shown[-1].left + shown[-1].width == pytest.approx(100), "inside the plot"
    assert all(one.left + one.width <= other.left + 1e-9 for one, other in pairwise(shown))
    many = line_chart(Lines("several", "step", [Curve("a", range(5000), range(5000))]), most_readings=40).readings
    assert len(many) == 40 and (many[0].title, many[-1].title) == ("step 0", "step 4999")
    alone = line_chart(Lines("several", "epoch", [Curve("a", [7], [2.0])])).readings
    assert [(reading.left, reading.width, reading.values) for reading in alone] == [(0, 100, [(0, "a", "2")])]


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
    chart = drawn([Curve("a <b>", range(5000), [float(k) for k in range(4999)] + [float("nan")])])
    assert "a &lt;b&gt;" in chart and "nan" not in chart
    points = re.search(r'points="([^"]*)"', chart)
    assert points is not None and 200 <= len(points[1].split()) <= 300
    assert "no finite number to draw" in drawn([Curve("empty", [], [])])


@pytest.mark.parametrize("script", ["start.py", "main.py"])
def test_the_command_in_the_report_is_what_a_user_would_type(script):
    assert program(str(Path(torchmn.__file__).with_name("cli") / script)) == "torchmn"
    assert program("/somewhere/bin/torchmn") == "torchmn" and program("/home/me/train.py") == "train.py"


def test_the_report_names_start_duration_commit_mode_and_best_epoch(halopar_run):
    text = (halopar_run / "report.html").read_text()
    assert "4 ranks, spatial parallel, 2 x 2 (height x width)" in text and "2 epochs" in text
    assert re.search(r'<li title="started">\d{4}-\d\d-\d\d \d\d:\d\d UTC</li>', text)
    assert re.search(r'<li title="duration">[\d.]+ (s|min \d\d s)</li>', text)
    assert re.search(r"<b>[12] of 2</b>best epoch: test loss [\d.]+</li>", text)
    commit = commit_of(Path())  # of the directory of shapes.yaml; the tests may run outside of a repository
    assert re.findall(r'<li title="git commit">(.*?)</li>', text) == ([commit[:12]] if commit else [])


def test_durations_are_short_texts():
    assert [duration(seconds) for seconds in (0.04, 59.94, 60, 192.4, 3900)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "3 min 12 s", "1 h 05 min",
    ]  # fmt: skip


def test_the_best_epoch_has_the_lowest_loss_of_held_out_samples():
    rows = [
        {"epoch": 1, "loss": 3.0, "test loss": 1.0, "validation loss": 5.0},
        {"epoch": 2, "loss": 2.0, "test loss": 2.0, "validation loss": 4.0},
        {"epoch": 3, "loss": 1.0, "test loss": 3.0, "validation loss": float("nan")},
    ]
    best = best_epoch(rows)
    assert best is not None and (best.epoch, best.name, best.loss) == (2, "validation loss", 4.0)
    assert best_epoch([{"epoch": 1, "loss": float("nan")}]) is None
    assert best_epoch([{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 2.0}]).epoch == 1


def test_the_commit_is_that_of_git(tmp_path):
    def git(*arguments: str, cwd: Path = tmp_path) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert commit_of(tmp_path) == ""
    git("init", "-q")
    inner = tmp_path / "inner"
    inner.mkdir()
    assert commit_of(inner) == ""
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD")
    assert commit_of(inner) == first
    git("pack-refs", "--all")
    assert commit_of(inner) == first
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git("commit", "-q", "--allow-empty", "-m", "second", cwd=tmp_path / "tree")
    assert commit_of(tmp_path / "tree") == git("rev-parse", "other") != first
    git("checkout", "-q", "--detach")
    assert commit_of(tmp_path) == first


def test_a_report_of_many_epochs_classes_and_pictures_is_small(tmp_path, monkeypatch):
    noise = np.random.default_rng(0)
    for split, count in (("train", 2), ("test", 3)):
        for number in range(24):
            folder = tmp_path / "images" / split / f"class number {number}"
            folder.mkdir(parents=True)
            for picture in range(count):
                pixels = noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                (folder / f"{picture}.png").write_bytes(png(pixels))
    metrics = "{train: [accuracy, log_loss, misclassified], test: [accuracy, log_loss, misclassified]}"
    changes = (
        "dataset={name: images, size: [64, 64]}", f"dataset.path={tmp_path / 'images'}", "epochs=150",
        "model.layers=[max_pool: 16, conv: {maps: 3, kernel: 3, padding: 1}, linear: 24]", f"metrics={metrics}",
        "predictions=[]", "keep=1", "parallel.mode=halopar",
    )  # fmt: skip
    request = Request("many.yaml", out=str(tmp_path / "run"), console=Console(quiet=True))
    torchmn.run_threads(lambda comm: train(experiment(TEXT, *changes), comm, request), 2)
    report = tmp_path / "run" / "report.html"
    text = report.read_text()
    assert text.count("<img") == 12 and "epochs are omitted here" in text and "class number 23" in text
    assert report.stat().st_size < 150_000


def test_learning_rate_and_gradient_norm_are_in_the_log_and_not_in_the_table(tmp_path):
    out = io.StringIO()
    changes = ("optimizer={name: sgd, lr: 0.1, schedule: {exponential: 0.5}}", "predictions=[]")
    request = Request("x.yaml", out=str(tmp_path), console=Console(file=out, width=80))
    torchmn.run_threads(lambda comm: train(experiment(TEXT, *changes), comm, request), 1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["learning rate"] for line in lines if "epoch" in line] == [0.1, 0.05]
    assert all(line["gradient norm"] > 0 for line in lines if "epoch" in line)
    printed = [line for line in out.getvalue().splitlines() if "/" not in line]  # paths are not broken
    assert "gradient" not in " ".join(printed) and max(map(len, printed)) <= 80
