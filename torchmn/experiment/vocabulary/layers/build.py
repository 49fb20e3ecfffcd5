"""Builds a torch module from the layers of an experiment, with shapes inferred from layer to layer."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torchmn.context import process
from torchmn.errors import ExperimentError, TorchMNError
from torchmn.experiment.file.registry import Layer
from torchmn.experiment.vocabulary.layers.options import (
    Shape,
    WeightedLayer,
    batch_norm_for,
    format_shape,
    optimizer_group,
    set_attributes,
)

SELF_EXPLANATORY = (
    ValueError, RuntimeError, TypeError, IndexError, NotImplementedError, AttributeError, TorchMNError, OSError
)  # fmt: skip
"""Errors whose text is enough, as for layers that do not fit. For others, the message adds their class and line."""


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Context manager that seeds torch's global generator and restores its state afterwards.

    Holds a lock of the process, since ranks that are threads share the generator.
    """
    with process.lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_layers(layers: Sequence[Layer], shape: Shape) -> nn.Sequential:
    """Returns the modules of `layers` in sequence, named as in the file with a number: conv1, conv1_relu, max_pool1.

    Args:
        layers: options of the layers.
        shape: the shape of one sample, without the batch dim.

    Raises:
        ExperimentError: if a layer does not fit; names its place in the file.
    """
    modules = nn.Sequential()
    counts: Counter[str] = Counter()
    for layer in layers:
        counts[layer.kind] += 1
        name = f"{layer.kind}{counts[layer.kind]}"
        with errors_at(layer.where, name, shape):
            for part, module in _modules_of(layer, name, shape):
                modules.add_module(part, module)
                shape = output_shape(module, shape)
    return modules


@contextmanager
def errors_at(where: str, name: str, shape: Shape | None = None) -> Iterator[None]:
    """Context manager that converts errors to an ExperimentError with place, name, reason and input shape.

    An ExperimentError passes unchanged: it already has the place of a nested layer.
    """
    try:
        yield
    except ExperimentError:
        raise
    except (Exception, SystemExit) as error:  # the code of users may raise anything
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        about = [] if shape is None or isinstance(error, ValueError) else [f"its input has shape {format_shape(shape)}"]
        if not isinstance(error, SELF_EXPLANATORY):
            reason = f"{type(error).__name__}: {reason}" if lines else reason
            last = traceback.extract_tb(error.__traceback__)[-1]
            about.insert(0, f"raised at {last.filename}:{last.lineno}")
        raise ExperimentError(f"{where}: {name}: {reason}" + (f" ({', '.join(about)})" if about else "")) from error


def _modules_of(layer: Layer, name: str, shape: Shape) -> Iterator[tuple[str, nn.Module]]:
    if layer.kind in ("linear", "rbm") and len(shape) > 1:
        yield f"{name}_flatten", nn.Flatten()
    module = layer.build(shape)
    yield name, module
    if isinstance(layer, WeightedLayer):
        layer.init_weights(module)
        if layer.optimizer is not None:
            set_attributes(module, optimizer_options=optimizer_group(layer.optimizer))
        if layer.bias_optimizer is not None:
            set_attributes(module, bias_optimizer_options=optimizer_group(layer.bias_optimizer))
        if layer.batch_norm:
            input_shape = (math.prod(shape),) if layer.kind == "linear" else shape
            yield f"{name}_norm", batch_norm_for(output_shape(module, input_shape))
        if layer.activation is not None:
            yield f"{name}_{layer.activation.kind}", layer.activation.build()


@torch.no_grad()
def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """Returns the shape of an output sample of `module`, found by a forward of zeros in eval mode."""
    training = module.training
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else None
    try:
        output = module.eval()(torch.zeros(1, *shape, dtype=dtype))
    finally:
        module.train(training)
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"expected it to return a tensor, got {type(output).__name__}")
    if output.dim() < 1 or output.shape[0] != 1:
        got = format_shape(tuple(output.shape))
        raise ValueError(f"expected the first dim of its output to be the batch, 1, got shape {got}")
    return tuple(output.shape[1:])
