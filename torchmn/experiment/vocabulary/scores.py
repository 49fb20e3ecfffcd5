"""Scores: what goes into the softmax or logistic function whose outputs a cost or a metric takes for probabilities.

`with_scores` finds these activations in a model, and lets the model give their inputs beside its outputs. They leave
the model as its outputs do, so that under every mode they are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.layers.build import output_shape
from torchmn.experiment.vocabulary.layers.composite import Branch
from torchmn.experiment.vocabulary.layers.options import Shape
from torchmn.experiment.vocabulary.layers.shaping import Slice


class Probabilities:
    """Probabilities p, as log p and log(1 - p), each computed when it is first asked for.

    In float32 a logistic output is exactly 1 from a score of 17 on: neither its logarithm nor its gradient says how
    wrong it is. The logarithms that are computed from scores do.
    """

    def __init__(self, log: Callable[[], Tensor], log_not: Callable[[], Tensor]):
        self._log, self._log_not = log, log_not

    @staticmethod
    def of_values(p: Tensor) -> Probabilities:
        """From probabilities whose scores are unknown: those that round to 0 or 1 have no gradient.

        Args:
            p: (batch, units, ...)
        """
        limits = torch.finfo(p.dtype)
        return Probabilities(
            lambda: p.clamp(min=limits.tiny).log(),
            lambda: (1 - p).clamp(min=limits.eps / 2).log(),  # the next smaller float than 1 is 1 - eps / 2
        )

    @property
    def log(self) -> Tensor:
        """log p: (batch, units, ...)"""
        return self._log()

    @property
    def log_not(self) -> Tensor:
        """log(1 - p): (batch, units, ...)"""
        return self._log_not()


def logarithms(outputs: Tensor | Probabilities) -> Probabilities:
    """What a cost or a metric is given, as logarithms."""
    return outputs if isinstance(outputs, Probabilities) else Probabilities.of_values(outputs)


def log_p(scores: Tensor, activation: str) -> Tensor:
    """log p of what `activation` makes of scores (batch, units, ...)."""
    return functional.log_softmax(scores, dim=1) if activation == "softmax" else functional.logsigmoid(scores)


def log_not_p(scores: Tensor, activation: str) -> Tensor:
    """log(1 - p) of what `activation` makes of scores (batch, units, ...)."""
    return _log_not_softmax(scores) if activation == "softmax" else functional.logsigmoid(-scores)


def _log_not_softmax(scores: Tensor) -> Tensor:
    """Only the largest p can round to 1: there 1 - p is the sum of the others, and elsewhere p is at most 1/2."""
    total = scores.logsumexp(dim=1, keepdim=True)
    best = scores.argmax(dim=1, keepdim=True)
    others = scores.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True) - total
    small = (scores - total).scatter(1, best, -1.0)
    return torch.log1p(-small.exp()).scatter(1, best, others)


PROBABILITIES = ("softmax", "logistic")
Units = tuple[int, int]
Shapes = Mapping[nn.Module, tuple[Shape, Shape]]
"""Of each module, the shapes of a sample before and after it."""


@dataclass(frozen=True)
class Outputs:
    """What a model gives for a batch: its outputs (batch, units, ...), and the scores that were asked for."""

    values: Tensor
    scores: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Piece:
    """The units from `first` to `last` behind an activation, whose inputs are the scores at `place`."""

    place: int
    activation: str
    first: int
    last: int


@dataclass(frozen=True)
class Source:
    """Where the probabilities of some outputs come from: pieces side by side, in the shape of these outputs."""

    pieces: tuple[Piece, ...]
    shape: Shape

    def probabilities(self, scores: Sequence[Tensor]) -> Probabilities:
        return Probabilities(lambda: self._joined(log_p, scores), lambda: self._joined(log_not_p, scores))

    def _joined(self, function: Any, scores: Sequence[Tensor]) -> Tensor:
        logs = [
            function(scores[piece.place], piece.activation)[:, piece.first : piece.last].flatten(1)
            for piece in self.pieces
        ]
        return torch.cat(logs, dim=1).reshape(len(logs[0]), *self.shape)


def with_scores(
    model: nn.Module, shape: Shape, readers: Iterable[tuple[Options, str]]
) -> tuple[nn.Module, dict[int, Source]]:
    """Lets a model give the scores from which costs and metrics are computed.

    Args:
        model: of `build_model`; changed in place
        shape: of a sample
        readers: costs and metrics, each with the activation of the units that it reads

    Returns:
        The model, which gives a tuple (outputs, scores, ...) if any scores were found, and the source of each reader
        that has one, by its id.
    """
    wanted = [reader for reader, activation in readers if _reads_logarithms(reader, activation)]
    if not wanted or not isinstance(model, nn.Sequential):
        return model, {}
    shapes, places, sources = _shapes(model, shape), dict[nn.Module, int](), dict[int, Source]()
    whole = shapes[model][1]
    for reader in wanted:
        units: Units = getattr(reader, "units", None) or (0, whole[0])
        found = _find(_flattened([model]), units, shapes)
        if found:
            pieces = [Piece(places.setdefault(of, len(places)), KINDS[type(of)], *some) for of, some in found]
            sources[id(reader)] = Source(tuple(pieces), (units[1] - units[0], *whole[1:]))
    if places:
        kept = _Kept()
        for activation, place in places.items():
            activation.register_forward_pre_hook(_Keep(kept, place))
        model.add_module("scores", _GiveScores(kept))
    return model, sources


def _reads_logarithms(reader: Options, activation: str) -> bool:
    return getattr(reader, "of_probabilities", False) and activation in PROBABILITIES


# -- where probabilities come from -------------------------------------------------------------------------------------

KINDS: dict[type[nn.Module], str] = {nn.Softmax: "softmax", nn.Sigmoid: "logistic"}
Found = list[tuple[nn.Module, Units]]


def _find(modules: Sequence[nn.Module], units: Units, shapes: Shapes) -> Found | None:
    """The activations that these units (along dim 1, behind the last module) come from; None where that is unclear."""
    for place in reversed(range(len(modules))):
        module = modules[place]
        if type(module) in KINDS:
            return [(module, units)]
        before, after = shapes.get(module, ((), ()))
        if isinstance(module, Branch):
            return _find_in_branch(modules[:place], module, units, shapes) if module.join == "concat" else None
        if isinstance(module, Slice):
            units = units[0] + module.first, units[1] + module.first
        elif not isinstance(module, nn.Identity | nn.Flatten | nn.Unflatten):
            return None
        elif before != after:
            if units != (0, after[0]):
                return None
            units = 0, before[0]  # all of them, in the same order
    return None


def _find_in_branch(before: Sequence[nn.Module], branch: Branch, units: Units, shapes: Shapes) -> Found | None:
    found: Found = []
    begin = 0
    for part in branch.branches:
        width = shapes[part][1][0]
        some = max(units[0] - begin, 0), min(units[1] - begin, width)
        if some[0] < some[1]:
            here = _find([*before, *_flattened([part])], some, shapes)
            if here is None:
                return None
            found += here
        begin += width
    return found


def _flattened(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in their order, in the place of each Sequential those inside of it."""
    return [
        inner for module in modules for inner in (_flattened(module) if isinstance(module, nn.Sequential) else [module])
    ]


def _shapes(model: nn.Module, shape: Shape) -> Shapes:
    found: dict[nn.Module, tuple[Shape, Shape]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            found[module] = tuple(args[0].shape[1:]), tuple(output.shape[1:])

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        output_shape(model, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return found


# -- inside of the model -----------------------------------------------------------------------------------------------


class _Kept:
    """The inputs of activations, from when they are computed to the end of the forward."""

    def __init__(self) -> None:
        self.scores: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()  # a copy of the model keeps its own


class _Keep:
    """A hook that keeps the input of an activation."""

    def __init__(self, kept: _Kept, place: int):
        self.kept, self.place = kept, place

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.kept.scores[self.place] = args[0]


class _GiveScores(nn.Module):
    """The last module: gives its input, and the scores that were kept."""

    def __init__(self, kept: _Kept):
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores, self.kept.scores = self.kept.scores, {}
        return x, *(scores[place] for place in sorted(scores))
