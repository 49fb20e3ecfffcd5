"""write_report: everything that is to be said about a run, on one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from torchmn.experiment.clock import RankTime
from torchmn.experiment.evaluation import predict
from torchmn.experiment.load import plain
from torchmn.experiment.model import build_model
from torchmn.experiment.objective import chosen
from torchmn.experiment.report.charts import Curve, bars, line_chart
from torchmn.experiment.report.environment import environment
from torchmn.experiment.report.mistakes import MOST_CLASSES, confusion, confusion_table, surest_mistakes
from torchmn.experiment.report.parts import model_table
from torchmn.experiment.report.style import STYLE
from torchmn.experiment.run_directory import RunDirectory
from torchmn.experiment.session import Session
from torchmn.experiment.writing import as_yaml


def write_report(
    session: Session, directory: RunDirectory, file: str, history: Sequence[Mapping[str, float]], times: list[RankTime]
) -> str:
    """Write report.html; every rank must call it, and rank 0 writes.

    Returns nothing, or why it could not be written: a training that is finished does not fail of a full disk.
    """
    split = session.shown_split
    outputs, targets = predict(session, split)
    surroundings = environment(session.comm)
    if session.comm.rank != 0:
        return ""
    title = Path(file).name
    sections = {
        "curves": ("Curves", _curves(directory.log, history)),
        "metrics": ("Metrics", _metrics(session, history)),
        "confusion": ("Mistakes", _mistakes(session, split, chosen(outputs, session.objective.class_units), targets)),
        "model": ("Model and ranks", _model(session)),
        "time": ("Time", _time(times)),
        "experiment": ("Experiment", f"<pre>{escape(as_yaml(plain(session.experiment)))}</pre>"),
        "environment": ("Environment", _table(surroundings)),
    }
    body = "".join(f'<section id="{name}"><h2>{head}</h2>{text}</section>' for name, (head, text) in sections.items())
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<header id="summary"><h1>{escape(title)}</h1>{_summary(session, history)}</header>{body}</body></html>\n'
    )
    try:
        directory.report.write_text(page, encoding="utf-8")
    except OSError as error:
        return f" can not be written ({error.strerror})"
    return ""


def _summary(session: Session, history: Sequence[Mapping[str, float]]) -> str:
    last = history[-1] if history else {}
    items = [("epochs", str(len(history))), ("ranks", escape(session.placed.description))]
    items += [(name, _number(session, name, value)) for name, value in last.items() if name != "epoch"]
    return f'<ul class="numbers">{"".join(f"<li><b>{value}</b>{escape(name)}</li>" for name, value in items)}</ul>'


def _number(session: Session, name: str, value: float) -> str:
    measure = session.measures.get(name.partition(" ")[2])
    return f"{value:.2%}" if measure is not None and measure.percent else f"{value:.5g}"


def _curves(log: Path, history: Sequence[Mapping[str, float]]) -> str:
    steps = [line for line in _lines(log) if "loss" in line and "epoch" not in line]
    # A loss that is not finite stands in the log as text, which JSON has no number for.
    losses = Curve("loss of each step", [step["step"] for step in steps], [float(step["loss"]) for step in steps])
    charts = line_chart([losses], "step", "loss")
    epochs = [row["epoch"] for row in history]
    for names in _alike(history).values():
        curves = [Curve(n, epochs, [row.get(n, nan) for row in history], k) for k, n in enumerate(names)]
        charts += line_chart(curves, "epoch", ", ".join(names))
    return charts


def _alike(history: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """The columns of each measure, as `train accuracy` and `test accuracy`: those that can share an axis."""
    found: dict[str, list[str]] = {}
    for name in _columns(history):
        if name != "epoch":
            found.setdefault(name.partition(" ")[2] or name, []).append(name)
    return found


def _columns(history: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of all epochs' numbers: a run may have gone on with other metrics."""
    return list(dict.fromkeys(name for row in history for name in row))


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, dict)]


def _metrics(session: Session, history: Sequence[Mapping[str, float]]) -> str:
    if not history:
        return "<p>no epoch is finished</p>"
    columns = _columns(history)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = "".join(
        "<tr>"
        + "".join(f"<td class='num'>{_number(session, n, row[n]) if n in row else ''}</td>" for n in columns)
        + "</tr>"
        for row in history
    )
    return f'<div class="scroll rows"><table><tr>{head}</tr>{rows}</table></div>'


def _mistakes(session: Session, split: str, outputs: np.ndarray, targets: np.ndarray) -> str:
    if targets.dtype.kind == "f" or outputs.ndim != 2 or outputs.shape[1] < 2:
        return "<p>The targets are no classes.</p>"
    data, known = session.splits[split], ~np.isnan(outputs).any(axis=1)
    table = "" if known.all() else f"<p>The outputs of {(~known).sum()} samples are NaN: these have no class.</p>"
    if not known.any():
        return table
    if outputs.shape[1] <= MOST_CLASSES:
        table += confusion_table(confusion(outputs[known], targets[known]), data.classes)
    shown = data if known.all() else data.only(np.flatnonzero(known))
    return table + surest_mistakes(shown, outputs[known], targets[known])


def _model(session: Session) -> str:
    """Rebuilt as on one rank, so that every layer can be seen with its global shapes."""
    data = session.splits["train"]
    serial = build_model(session.experiment, data)
    return f"<p>{_shared(session)}</p>" + model_table(serial, session.placed, data.shape)


def _shared(session: Session) -> str:
    placed, size = session.placed, session.experiment.batch_size
    if placed.comm.size == 1:
        return "All of it on one rank."
    what = {
        "datapar": "each rank computes its share of the samples with the whole model",
        "modelpar": "ranks divide the vectors, and so the weights",
        "vecpar": "ranks divide the vectors, and so the weights",
        "hybrid": "groups of ranks divide the samples, and the ranks of a group the vectors",
        "halopar": "each rank has its tile of every image, and fetches from its neighbours what its windows reach",
        "halodatapar": "groups of ranks divide the samples, and the ranks of a group the images",
    }[placed.mode]
    shares = f" A batch of {size} is divided into {placed.replicas.size}." if placed.replicas.size > 1 else ""
    return escape(f"{placed.description}: {what}.{shares}")


def _time(times: list[RankTime]) -> str:
    rows = [(f"rank {rank}", (time.compute, time.exchange, time.waiting)) for rank, time in enumerate(times)]
    about = (
        "All training steps together. Exchange is what the rank that communicates least spends on it, waiting what "
        "the others spend more."
    )
    return bars(rows, ("compute", "exchange", "waiting"), "seconds") + f"<p><small>{about}</small></p>"


def _table(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<div class="scroll"><table>{rows}</table></div>'
