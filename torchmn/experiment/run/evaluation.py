"""Loss and metrics of a whole split, and its predictions: those of one rank, at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchmn.data.batches import Batches
from torchmn.experiment.run.session import Session
from torchmn.experiment.vocabulary.scores import Outputs


@torch.no_grad()
def evaluate(session: Session, split: str) -> dict[str, float]:
    """The mean loss and the metrics of a split (all there are, if the file names none for it).

    Every rank must call it, and gets the same.
    """
    data = session.splits[split]
    measures = session.measured.get(split, session.measures)
    sums = torch.zeros(1 + len(measures), dtype=torch.float64)
    kept: list[tuple[Tensor, Tensor]] = []
    keeps = any(measure.needs_all for measure in measures.values())
    for outputs, targets, rows in _outputs(session, split):
        sums[0] += session.losses(outputs, targets, data, rows).double().sum().cpu()
        for place, measure in enumerate(measures.values(), start=1):
            if not measure.needs_all:
                sums[place] += measure.of(measure.seen(outputs), targets).sum().cpu()
        if keeps:
            kept.append((outputs.values.cpu(), targets.cpu()))
    replicas = session.placed.replicas
    totals = replicas.allreduce(sums).tolist()
    everything = whole(session, kept) if keeps else None
    values = {"loss": totals[0] / len(data)}
    for (name, measure), total in zip(measures.items(), totals[1:], strict=True):
        values[name] = (
            float(measure.of(*everything)) if measure.needs_all and everything else measure.finish(total, len(data))
        )
    return values


@torch.no_grad()
def predict(session: Session, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The model's outputs for a split and its targets, in the order of the data; every rank must call it."""
    kept = [(outputs.values.cpu(), targets.cpu()) for outputs, targets, _ in _outputs(session, split)]
    outputs, targets = whole(session, kept)
    return outputs.numpy(), targets.numpy()


def _outputs(session: Session, split: str) -> Iterator[tuple[Outputs, Tensor, np.ndarray]]:
    """Outputs and targets of this rank's part of each batch, and the rows of all of it."""
    data = session.splits[split]
    batches = Batches(len(data), session.experiment.batch_size)
    model = session.placed.model
    was_training = model.training
    model.eval()
    try:
        order = batches.order(0)
        for number in range(batches.steps):
            rows = batches.rows(order, number)
            inputs, targets = session.batch(data, rows)
            yield session.placed.forward(inputs), targets, rows
    finally:
        model.train(was_training)


def whole(session: Session, kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All ranks' outputs and targets, in the order of the data: batch by batch, and in each rank by rank."""
    replicas = session.placed.replicas
    lengths = replicas.allgather_obj([len(targets) for _, targets in kept])
    joined = []
    for place in range(2):
        parts = replicas.allgather(torch.cat([pair[place] for pair in kept]))
        pieces = [part.split(sizes) for part, sizes in zip(parts, lengths, strict=True)]
        joined.append(torch.cat([piece for batch in zip(*pieces, strict=True) for piece in batch]))
    return joined[0], joined[1]
