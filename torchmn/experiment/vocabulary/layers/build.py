"""From layers of an experiment to a torch module: shapes are inferred from layer to layer."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torchmn.context import process
from torchmn.errors import ExperimentError, TorchMNError
from torchmn.experiment.file.registry import Layer
from torchmn.experiment.vocabulary.layers.options import Shape, Weighted, batch_norm_for, text

USUAL = (ValueError, RuntimeError, TypeError, IndexError, NotImplementedError, AttributeError, TorchMNError, OSError)
"""Errors of layers that do not fit, whose text is enough; of others, users need the kind and the line too."""


@contextmanager
def random_numbers_from(seed: int) -> Iterator[None]:
    """Inside, torch's global generator starts from `seed`; afterwards it goes on as before.

    One thread at a time: ranks that are threads share that generator.
    """
    with process.lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def chain(layers: Sequence[Layer], shape: Shape) -> nn.Sequential:
    """The modules of `layers`, one after the other, for samples of `shape`.

    They are named as in the file, with a number: conv1, conv1_relu, max_pool1. A layer that does not fit is an
    ExperimentError with its place in the file.
    """
    modules = nn.Sequential()
    counts: Counter[str] = Counter()
    for layer in layers:
        counts[layer.kind] += 1
        name = f"{layer.kind}{counts[layer.kind]}"
        with naming(layer.where, name, shape):
            for part, module in _modules_of(layer, name, shape):
                modules.add_module(part, module)
                shape = output_shape(module, shape)
    return modules


@contextmanager
def naming(where: str, name: str, shape: Shape | None = None) -> Iterator[None]:
    """Turns every error inside into an ExperimentError: place in the file, what was built there, reason, input's shape.

    An error that is one already has named a place of its own: that of a layer inside of a layer.
    """
    try:
        yield
    except ExperimentError:
        raise
    except (Exception, SystemExit) as error:  # a word of a user's own may raise anything
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        about = [] if shape is None or isinstance(error, ValueError) else [f"its input has shape {text(shape)}"]
        if not isinstance(error, USUAL):
            reason = f"{type(error).__name__}: {reason}" if lines else reason
            last = traceback.extract_tb(error.__traceback__)[-1]
            about.insert(0, f"raised at {last.filename}:{last.lineno}")
        raise ExperimentError(f"{where}: {name}: {reason}" + (f" ({', '.join(about)})" if about else "")) from error


def _modules_of(layer: Layer, name: str, shape: Shape) -> Iterator[tuple[str, nn.Module]]:
    if layer.kind in ("linear", "rbm") and len(shape) > 1:
        yield f"{name}_flatten", nn.Flatten()
    module = layer.build(shape)
    yield name, module
    if isinstance(layer, Weighted):
        layer.begin(module)
        if layer.optimizer is not None:
            module.own_rule = layer.optimizer.as_group()  # type: ignore[assignment]
        if layer.batch_norm:
            yield (
                f"{name}_norm",
                batch_norm_for(output_shape(module, shape if layer.kind != "linear" else _flat(shape))),
            )
        if layer.activation is not None:
            yield f"{name}_{layer.activation.kind}", layer.activation.build()


def _flat(shape: Shape) -> Shape:
    return (int(torch.Size(shape).numel()),)


@torch.no_grad()
def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """The shape of a sample after `module`, found by trying it; its state stays as it is."""
    training = module.training
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else None
    try:
        output = module.eval()(torch.zeros(1, *shape, dtype=dtype))
    finally:
        module.train(training)
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"it gives {type(output).__name__}, and no tensor")
    if output.dim() < 1 or output.shape[0] != 1:
        raise ValueError(f"it gives {text(tuple(output.shape))} for a batch of 1: the first dim must stay the batch")
    return tuple(output.shape[1:])
