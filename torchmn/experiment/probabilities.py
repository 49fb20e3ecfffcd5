"""Probabilities by their logarithms, which costs and metrics need where a probability itself rounds to 0 or 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


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
