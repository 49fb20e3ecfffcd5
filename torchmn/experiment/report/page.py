"""write_report: renders report.html from the templates in templates/."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

import torchmn
from torchmn.communicators.communicator import Communicator
from torchmn.experiment.file.writing import as_yaml
from torchmn.experiment.report.confusion import confusion_of
from torchmn.experiment.report.history import (
    best_epoch,
    charts,
    columns,
    is_metric,
    measure_of,
    shown_rows,
)
from torchmn.experiment.report.layer_table import layer_table
from torchmn.experiment.run.clock import RankTime
from torchmn.experiment.run.evaluation import predict
from torchmn.experiment.run.model import build_model
from torchmn.experiment.run.objective import select_units
from torchmn.experiment.run.run_directory import RunDirectory
from torchmn.experiment.run.session import Session
from torchmn.experiment.vocabulary.load import plain
from torchmn.modes import mode_of

TEMPLATES = Environment(
    loader=PackageLoader("torchmn.experiment.report"),
    autoescape=True,  # names of files, classes and modules come from the user
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class RunRecord:
    """What a report shows of a run besides its session.

    Attributes:
        file: name of the experiment file.
        history: loss and metrics of each epoch.
        times: of each rank.
        started: date and time.
        seconds: duration.
        commit: git commit of the directory of the experiment file; "" if it is not in a repository.
    """

    file: str
    history: Sequence[Mapping[str, float]]
    times: Sequence[RankTime]
    started: str
    seconds: float
    commit: str = ""


def write_report(session: Session, directory: RunDirectory, run: RunRecord) -> str:
    """Writes report.html on rank 0. Every rank must call it.

    Args:
        session: the trained model and its data.
        directory: of the run.
        run: the rest.

    Returns:
        "" or the reason why the file could not be written; a full disk does not make a finished training fail.
    """
    split = session.report_split
    outputs, targets = predict(session, split)
    machine = environment(session.comm)
    if session.comm.rank != 0:
        return ""
    shown, names = shown_rows(run.history), columns(run.history)
    page = TEMPLATES.get_template("report.html").render(
        title=Path(run.file).name,
        facts=_facts(session, run),
        numbers=_numbers(session, run.history),
        charts=charts(directory.log, run.history, lambda measure: _is_percent(session, measure)),
        columns=names,
        epochs=[[_text(session, name, row[name]) if name in row else "" for name in names] for row in shown],
        omitted=len(run.history) - len(shown),
        split=split,
        confusion=confusion_of(session.splits[split], select_units(outputs, session.objective.class_units), targets),
        division=_division(session),
        # Built again as on one rank, for the global shapes.
        layers=layer_table(
            build_model(session.experiment, session.splits["train"]), session.placed, session.splits["train"].shape
        ),
        times=[(f"rank {rank}", (time.compute, time.exchange, time.waiting)) for rank, time in enumerate(run.times)],
        experiment=as_yaml(plain(session.experiment)),
        environment=machine,
    )
    try:
        # Names of files may have bytes that are not UTF-8.
        directory.report.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f" cannot be written ({error.strerror})"
    return ""


def environment(comm: Communicator) -> dict[str, str]:
    """Returns names and values of the section "Environment". Every rank must call it."""
    hosts = comm.allgather_obj(platform.node())
    return {
        "finished": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([program(sys.argv[0]), *sys.argv[1:]]),
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


def program(path: str) -> str:
    """Returns the program as a user would type it; ranks of `torchmn train -n` run a script of torchmn.cli."""
    return "torchmn" if Path(path).parent == Path(torchmn.__file__).with_name("cli") else Path(path).name


def duration(seconds: float) -> str:
    """Returns a duration as text: "8.2 s", "3 min 12 s" or "1 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_rest = divmod(minutes, 60)
    return f"{hours} h {minutes_rest:02} min" if hours else f"{minutes} min {rest:02} s"


def _facts(session: Session, run: RunRecord) -> list[tuple[str, str]]:
    epochs = f"{len(run.history)} epoch{'' if len(run.history) == 1 else 's'}"
    facts = [("ranks", session.placed.description), ("length", epochs), ("started", run.started)]
    return [*facts, ("duration", duration(run.seconds)), *([("git commit", run.commit[:12])] if run.commit else [])]


def _numbers(session: Session, history: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Returns names and values of the losses and metrics of the last epoch, and the best epoch."""
    last = history[-1] if history else {}
    numbers = [(name, _text(session, name, value)) for name, value in last.items() if is_metric(name)]
    best = best_epoch(history)
    if best is not None:
        numbers.append((f"best epoch: {best.name} {best.loss:.5g}", f"{best.epoch} of {len(history)}"))
    return numbers


def _is_percent(session: Session, measure: str) -> bool:
    return measure in session.measures and session.measures[measure].percent


def _text(session: Session, name: str, value: float) -> str:
    return f"{value:.2%}" if _is_percent(session, measure_of(name)) else f"{value:.5g}"


def _division(session: Session) -> str:
    placed, size = session.placed, session.experiment.batch_size
    if placed.comm.size == 1:
        return "The whole model on one rank."
    mode = mode_of(placed.mode)
    batch = f" A batch of {size} is divided among {placed.replicas.size} ranks." if placed.replicas.size > 1 else ""
    return f"{mode.description[0].upper()}{mode.description[1:]}.{batch}"
