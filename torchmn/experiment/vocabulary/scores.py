"""Computes costs and metrics of probabilities from scores (logits), the inputs of a softmax or logistic activation.

`with_scores` finds these activations in a model and makes the model return their inputs together with its outputs. As
outputs of the model, scores are global tensors on every rank in every parallel mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.layers.build import output_shape
from torchmn.experiment.vocabulary.layers.composite import Branch
from torchmn.experiment.vocabulary.layers.options import Shape
from torchmn.experiment.vocabulary.layers.shaping import Slice


class Probabilities:
    """Probabilities p, available as log p and log(1 - p), each computed on access.

    In float32, a logistic output rounds to 1 for scores above 17: its logarithm and gradient then lose the error.
    Logarithms computed from scores keep it.
    """

    def __init__(self, log: Callable[[], Tensor], log_complement: Callable[[], Tensor]):
        self._log, self._log_complement = log, log_complement

    @staticmethod
    def of_values(p: Tensor) -> Probabilities:
        """Returns probabilities whose scores are unknown: those that round to 0 or 1 have no gradient.

        Args:
            p: (batch, units, ...)
        """
        limits = torch.finfo(p.dtype)
        return Probabilities(
            lambda: p.clamp(min=limits.tiny).log(),
            lambda: (1 - p).clamp(min=limits.eps / 2).log(),  # the largest float below 1 is 1 - eps / 2
        )

    @property
    def log(self) -> Tensor:
        """log p: (batch, units, ...)"""
        return self._log()

    @property
    def log_complement(self) -> Tensor:
        """log(1 - p): (batch, units, ...)"""
        return self._log_complement()


def as_probabilities(outputs: Tensor | Probabilities) -> Probabilities:
    """Returns the outputs as `Probabilities`."""
    return outputs if isinstance(outputs, Probabilities) else Probabilities.of_values(outputs)


def log_p(scores: Tensor, activation: str) -> Tensor:
    """Returns log p, where p is the activation of the scores: (batch, units, ...)."""
    return functional.log_softmax(scores, dim=1) if activation == "softmax" else functional.logsigmoid(scores)


def log_complement_p(scores: Tensor, activation: str) -> Tensor:
    """Returns log(1 - p), where p is the activation of the scores: (batch, units, ...)."""
    return _log_complement_softmax(scores) if activation == "softmax" else functional.logsigmoid(-scores)


def _log_complement_softmax(scores: Tensor) -> Tensor:
    # Only the largest p can round to 1: there 1 - p is computed as the sum of the others. Elsewhere p is at most 1/2.
    total = scores.logsumexp(dim=1, keepdim=True)
    best = scores.argmax(dim=1, keepdim=True)
    others = scores.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True) - total
    small = (scores - total).scatter(1, best, -1.0)
    return torch.log1p(-small.exp()).scatter(1, best, others)


PROBABILITIES = ("softmax", "logistic")
Units = tuple[int, int]
Shapes = Mapping[nn.Module, tuple[Shape, Shape]]
"""Maps each module to the shapes of its input and output sample."""


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for a batch, (batch, units, ...), and the scores that costs and metrics need."""

    values: Tensor
    scores: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ScoreSlice:
    """Units `first` to `last` (exclusive) of an activation, whose inputs are entry `index` of `Outputs.scores`."""

    index: int
    activation: str
    first: int
    last: int


@dataclass(frozen=True)
class ProbabilitySource:
    """The scores from which the probabilities of some outputs are computed: slices to concatenate and reshape."""

    slices: tuple[ScoreSlice, ...]
    shape: Shape

    def probabilities(self, scores: Sequence[Tensor]) -> Probabilities:
        """Returns the probabilities of a batch, given `Outputs.scores`."""
        return Probabilities(
            lambda: self._concatenate(log_p, scores), lambda: self._concatenate(log_complement_p, scores)
        )

    def _concatenate(self, function: Callable[[Tensor, str], Tensor], scores: Sequence[Tensor]) -> Tensor:
        if len(self.slices) == 1 and scores[self.slices[0].index].shape[1:] == self.shape:  # the usual case
            (part,) = self.slices
            return function(scores[part.index], part.activation)
        logs = [
            function(scores[part.index], part.activation)[:, part.first : part.last].flatten(1) for part in self.slices
        ]
        return torch.cat(logs, dim=1).reshape(len(logs[0]), *self.shape)


def with_scores(
    model: nn.Module, shape: Shape, costs_and_metrics: Iterable[tuple[Options, str]]
) -> tuple[nn.Module, dict[int, ProbabilitySource]]:
    """Makes a model return the scores from which costs and metrics are computed.

    Args:
        model: the result of `build_model`; modified in place.
        shape: the shape of a sample.
        costs_and_metrics: each with the activation of the units that it applies to.

    Returns:
        The model, which returns a tuple (outputs, scores, ...) if any scores were found; and the sources of the costs
        and metrics that have one, by the id of their options.
    """
    consumers = [options for options, activation in costs_and_metrics if _needs_probabilities(options, activation)]
    if not consumers or not isinstance(model, nn.Sequential):
        return model, {}
    shapes, indices, sources = _shapes(model, shape), dict[nn.Module, int](), dict[int, ProbabilitySource]()
    output = shapes[model][1]
    for options in consumers:
        units: Units = getattr(options, "units", None) or (0, output[0])
        found = _find(_flatten_modules([model]), units, shapes)
        if found:
            slices = [ScoreSlice(indices.setdefault(of, len(indices)), KINDS[type(of)], *some) for of, some in found]
            sources[id(options)] = ProbabilitySource(tuple(slices), (units[1] - units[0], *output[1:]))
    if indices:
        captured = _CapturedScores()
        for activation, index in indices.items():
            activation.register_forward_pre_hook(_CaptureInput(captured, index))
        model.add_module("scores", _ReturnScores(captured))
    return model, sources


def _needs_probabilities(options: Options, activation: str) -> bool:
    return getattr(options, "of_probabilities", False) and activation in PROBABILITIES


# -- finding the activations -------------------------------------------------------------------------------------------

KINDS: dict[type[nn.Module], str] = {nn.Softmax: "softmax", nn.Sigmoid: "logistic"}
Found = list[tuple[nn.Module, Units]]


def _find(modules: Sequence[nn.Module], units: Units, shapes: Shapes) -> Found | None:
    """Returns the activations whose outputs are these units of the last module's output; None if that is unclear."""
    for index in reversed(range(len(modules))):
        module = modules[index]
        if type(module) in KINDS:
            return [(module, units)]
        before, after = shapes.get(module, ((), ()))
        if isinstance(module, Branch):
            return _find_in_branch(modules[:index], module, units, shapes) if module.join == "concat" else None
        if isinstance(module, Slice):
            units = units[0] + module.first, units[1] + module.first
        elif not isinstance(module, nn.Identity | nn.Flatten | nn.Unflatten):
            return None
        elif before != after:
            if units != (0, after[0]):
                return None
            units = 0, before[0]  # all units, in the same order
    return None


def _find_in_branch(before: Sequence[nn.Module], branch: Branch, units: Units, shapes: Shapes) -> Found | None:
    found: Found = []
    begin = 0
    for part in branch.branches:
        width = shapes[part][1][0]
        some = max(units[0] - begin, 0), min(units[1] - begin, width)
        if some[0] < some[1]:
            here = _find([*before, *_flatten_modules([part])], some, shapes)
            if here is None:
                return None
            found += here
        begin += width
    return found


def _flatten_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules in order, with each Sequential replaced by the modules in it."""
    return [
        inner
        for module in modules
        for inner in (_flatten_modules(module) if isinstance(module, nn.Sequential) else [module])
    ]


def _shapes(model: nn.Module, shape: Shape) -> Shapes:
    found: dict[nn.Module, tuple[Shape, Shape]] = {}

    def note(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            found[module] = tuple(args[0].shape[1:]), tuple(output.shape[1:])

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        output_shape(model, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return found


# -- modules and hooks ------------------------------------------------------------------------------------------------


class _CapturedScores:
    """Inputs of activations during one forward, by index."""

    def __init__(self) -> None:
        self.scores: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> _CapturedScores:
        return _CapturedScores()  # a copied model captures its scores separately


class _CaptureInput:
    """A forward pre-hook that stores the input of an activation."""

    def __init__(self, captured: _CapturedScores, index: int):
        self.captured, self.index = captured, index

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.captured.scores[self.index] = args[0]


class _ReturnScores(nn.Module):
    """The last module of a model: returns its input and the captured scores."""

    def __init__(self, captured: _CapturedScores):
        super().__init__()
        self.captured = captured

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores, self.captured.scores = self.captured.scores, {}
        return x, *(scores[index] for index in sorted(scores))
