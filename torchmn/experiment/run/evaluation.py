"""Computes loss, metrics and predictions of a whole split; the results are the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchmn.data.batches import BatchSchedule
from torchmn.experiment.run.session import Session
from torchmn.experiment.vocabulary.scores import Outputs


@torch.no_grad()
def evaluate(session: Session, split: str) -> dict[str, float]:
    """Returns the mean loss and the metrics of a split, on every rank. Every rank must call it.

    If the experiment has no metrics for this split, those of all other splits are computed.
    """
    data = session.splits[split]
    measures = session.split_measures.get(split, session.measures)
    sums = torch.zeros(1 + len(measures), dtype=torch.float64)
    batches: list[tuple[Tensor, Tensor]] = []
    needs_all = any(measure.needs_all for measure in measures.values())
    for outputs, targets, rows in _outputs(session, split):
        sums[0] += session.losses(outputs, targets, data, rows).double().sum().cpu()
        for index, measure in enumerate(measures.values(), start=1):
            if not measure.needs_all:
                sums[index] += measure.of(measure.select(outputs), targets).sum().cpu()
        if needs_all:
            batches.append((outputs.values.cpu(), targets.cpu()))
    replicas = session.placed.replicas
    totals = replicas.allreduce(sums).tolist()
    gathered = gather_batches(session, batches) if needs_all else None
    values = {"loss": totals[0] / len(data)}
    for (name, measure), total in zip(measures.items(), totals[1:], strict=True):
        values[name] = (
            float(measure.of(*gathered)) if measure.needs_all and gathered else measure.finish(total, len(data))
        )
    return values


@torch.no_grad()
def predict(session: Session, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns outputs and targets of a split, in the order of the data set. Every rank must call it."""
    batches = [(outputs.values.cpu(), targets.cpu()) for outputs, targets, _ in _outputs(session, split)]
    outputs, targets = gather_batches(session, batches)
    return outputs.numpy(), targets.numpy()


def _outputs(session: Session, split: str) -> Iterator[tuple[Outputs, Tensor, np.ndarray]]:
    """Yields outputs and targets of this rank's samples of each batch, and the rows of the whole batch."""
    data = session.splits[split]
    batches = BatchSchedule(len(data), session.experiment.batch_size)
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


def gather_batches(session: Session, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the outputs and targets of all ranks: batch by batch, and within a batch in rank order.

    Args:
        session: the session that computed them.
        batches: this rank's outputs and targets of each batch.
    """
    replicas = session.placed.replicas
    lengths = replicas.allgather_obj([len(targets) for _, targets in batches])
    joined = []
    for index in range(2):
        shards = replicas.allgather(torch.cat([batch[index] for batch in batches]))
        pieces = [shard.split(sizes) for shard, sizes in zip(shards, lengths, strict=True)]
        joined.append(torch.cat([piece for batch in zip(*pieces, strict=True) for piece in batch]))
    return joined[0], joined[1]
