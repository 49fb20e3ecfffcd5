"""write_report: renders report.html from the templates in templates/."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

import torchmn
from torchmn.communicators.communicator import Communicator
from torchmn.experiment.file.writing import as_yaml
from torchmn.experiment.report.charts import Chart, Curve, line_chart
from torchmn.experiment.report.confusion import confusion_of
from torchmn.experiment.report.layer_table import LayerRow, layer_rows
from torchmn.experiment.run.clock import RankTime
from torchmn.experiment.run.evaluation import predict
from torchmn.experiment.run.model import build_model
from torchmn.experiment.run.objective import select_units
from torchmn.experiment.run.run_directory import RunDirectory
from torchmn.experiment.run.session import Session
from torchmn.experiment.vocabulary.load import plain
from torchmn.modes import mode_of


def environment(comm: Communicator) -> dict[str, str]:
    """Returns names and values of the section "Environment". Every rank must call it."""
    hosts = comm.allgather_obj(platform.node())
    return {
        "finished": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
        "ranks": f"{comm.size} over {comm.traits.name}",
        "hosts": ", ".join(f"{host} ({hosts.count(host)})" for host in dict.fromkeys(hosts)),
        "device": str(comm.device),
        "threads per rank": str(torch.get_num_threads()),
        "cores of this machine": str(os.cpu_count()),
        "torchmn": torchmn.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _program(path: str) -> str:
    """Returns the program as a user would type it; ranks of `torchmn train -n` run a script of torchmn.cli."""
    return "torchmn" if Path(path).parent == Path(torchmn.__file__).with_name("cli") else Path(path).name


TEMPLATES = Environment(
    loader=PackageLoader("torchmn.experiment.report"),
    autoescape=True,  # names of files, classes and modules come from the user
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(
    session: Session, directory: RunDirectory, file: str, history: Sequence[Mapping[str, float]], times: list[RankTime]
) -> str:
    """Writes report.html on rank 0. Every rank must call it.

    Args:
        session: the trained model and its data.
        directory: of the run.
        file: name of the experiment file, for the title.
        history: loss and metrics of each epoch.
        times: of each rank.

    Returns:
        "" or the reason why the file could not be written; a full disk does not make a finished training fail.
    """
    split = session.report_split
    outputs, targets = predict(session, split)
    variables = environment(session.comm)
    if session.comm.rank != 0:
        return ""
    page = TEMPLATES.get_template("report.html").render(
        title=Path(file).name,
        summary=_summary(session, history),
        curves=_curves(directory.log, history),
        columns=_columns(history),
        epochs=_epochs(session, history),
        confusion=confusion_of(session.splits[split], select_units(outputs, session.objective.class_units), targets),
        ranks=_division(session),
        layers=_layers(session),
        times=[(f"rank {rank}", (time.compute, time.exchange, time.waiting)) for rank, time in enumerate(times)],
        experiment=as_yaml(plain(session.experiment)),
        environment=variables,
    )
    try:
        directory.report.write_text(page, encoding="utf-8")
    except OSError as error:
        return f" cannot be written ({error.strerror})"
    return ""


def _summary(session: Session, history: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    last = history[-1] if history else {}
    numbers = [(name, _number(session, name, value)) for name, value in last.items() if name != "epoch"]
    return [("epochs", str(len(history))), ("ranks", session.placed.description), *numbers]


def _number(session: Session, name: str, value: float) -> str:
    measure = session.measures.get(name.partition(" ")[2])
    return f"{value:.2%}" if measure is not None and measure.percent else f"{value:.5g}"


def _curves(log: Path, history: Sequence[Mapping[str, float]]) -> list[Chart]:
    steps = [line for line in _lines(log) if "loss" in line and "epoch" not in line]
    # JSON has no NaN or infinity: the log has them as strings.
    losses = Curve("loss of each step", [step["step"] for step in steps], [float(step["loss"]) for step in steps])
    charts = [line_chart([losses], "step", "loss")]
    epochs = [row["epoch"] for row in history]
    for names in _names_by_measure(history).values():
        curves = [Curve(n, epochs, [row.get(n, nan) for row in history], k) for k, n in enumerate(names)]
        charts.append(line_chart(curves, "epoch", ", ".join(names)))
    return charts


def _names_by_measure(history: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """Groups columns that share a chart: `train accuracy` and `test accuracy`."""
    found: dict[str, list[str]] = {}
    for name in _columns(history):
        if name != "epoch":
            found.setdefault(name.partition(" ")[2] or name, []).append(name)
    return found


def _columns(history: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the names in all epochs, as metrics may change when a run is resumed."""
    return list(dict.fromkeys(name for row in history for name in row))


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, dict)]


def _epochs(session: Session, history: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Returns the numbers of each epoch, in the order of `_columns`; "" for missing ones."""
    return [[_number(session, n, row[n]) if n in row else "" for n in _columns(history)] for row in history]


def _layers(session: Session) -> list[LayerRow]:
    # Built again as on one rank, for the global shapes.
    data = session.splits["train"]
    return layer_rows(build_model(session.experiment, data), session.placed, data.shape)


def _division(session: Session) -> str:
    placed, size = session.placed, session.experiment.batch_size
    if placed.comm.size == 1:
        return "The whole model on one rank."
    batch = f" A batch of {size} is divided among {placed.replicas.size} ranks." if placed.replicas.size > 1 else ""
    return f"{placed.description}: {mode_of(placed.mode).description}.{batch}"
