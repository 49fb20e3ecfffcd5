"""The pretraining of an experiment's autoencoder, on all ranks, with the batches of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from torchmn.experiment.batches import Batches
from torchmn.experiment.session import Session
from torchmn.models import PretrainingProgress, SparseAutoencoder, pretrain


class Stopped(Exception):
    """The user wants to stop; all ranks know it."""


class _Images:
    """This rank's part of the images of each batch, in the order of the data, as often as they are asked for."""

    def __init__(self, session: Session):
        experiment, self.session = session.experiment, session
        self.data = session.splits["train"]
        self.batches = Batches(len(self.data), experiment.batch_size, drop_last=experiment.drop_last)

    def __iter__(self) -> Iterator[Tensor]:
        order = self.batches.order(0)
        for number in range(self.batches.steps):
            yield self.session.batch(self.data, self.batches.rows(order, number))[0]


def pretraining_steps(session: Session) -> int:
    """How many steps the pretraining takes; 0 for a model that has none."""
    spec = session.experiment.the_model().autoencoder
    return 0 if spec is None else spec.pretraining.epochs * len(spec.kernels) * _Images(session).batches.steps


def pretrain_session(
    session: Session, stop: Callable[[], bool], report: Callable[[PretrainingProgress], None]
) -> list[dict[str, float]]:
    """Pretrain the stacks one after the other; gives a row of numbers for each stack and epoch.

    `stop` is asked after every step, on every rank: then Stopped is raised on all.
    """
    spec, model = session.experiment.the_model().autoencoder, session.placed.model
    assert isinstance(model, SparseAutoencoder)

    def progress(step: PretrainingProgress) -> None:
        report(step)
        if session.placed.joined(0.0, stop())[1]:
            raise Stopped

    costs = pretrain(
        model, _Images(session), epochs=spec.pretraining.epochs, learning_rate=spec.pretraining.lr, progress=progress
    )
    return [
        {
            "stack": stack + 1,
            "pretraining": epoch + 1,
            "reconstruction": cost.reconstruction,
            "sparsity": cost.sparsity,
            "cost": cost.total,
        }
        for stack, epochs in enumerate(costs)
        for epoch, cost in enumerate(epochs)
    ]
