"""Builds the model of an experiment, loads its data, and checks that they fit each other."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm
from torchmn.datasets import Arrays, DatasetError
from torchmn.datasets.formats.files import expanded
from torchmn.errors import ExperimentError
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.datasets import Splits
from torchmn.experiment.vocabulary.layers.boltzmann import Boltzmann, boltzmann_layers
from torchmn.experiment.vocabulary.layers.build import build_layers, errors_at, output_shape, torch_seed
from torchmn.experiment.vocabulary.layers.options import Shape, format_shape
from torchmn.experiment.vocabulary.schema import Experiment

_CHECKED = 8
"""Number of samples with which metrics are tried before training."""


def build_model(experiment: Experiment, data: Arrays) -> nn.Module:
    """Returns the experiment's model, on one rank and with the initial weights of its seed.

    It is built in float32 and converted, so that a run in float64 begins with the same weights.

    Args:
        experiment: the experiment.
        data: training samples, whose shape and targets the model must fit.

    Raises:
        ExperimentError: if a layer does not fit its input, or the outputs do not fit the targets.
    """
    spec = experiment.model
    experiment.costs_and_metrics()  # raises an error if the activation of a cost or metric is ambiguous
    with torch_seed(experiment.seed):
        if spec.layers:
            model: nn.Module = build_layers(spec.layers, data.shape)
            where = spec.layers[-1].where
        else:
            built = spec.module or spec.autoencoder
            assert built is not None  # the schema requires one of the three
            where = built.where
            with errors_at(where, "module" if spec.module else "autoencoder", data.shape):
                model = built.build(data.shape)
                output_shape(model, data.shape)
        with errors_at(where, f"the model in {experiment.dtype}", data.shape):
            model.to(experiment.torch_dtype())
            shape = output_shape(model, data.shape)
        _check_outputs(experiment, shape, data, where)
        _check_batch_norms(experiment, model, data, where)
    if len(boltzmann_layers(model)) < sum(isinstance(module, Boltzmann) for module in model.modules()):
        raise ExperimentError(f"{where}: rbm must be in the model's list of layers, not inside another layer")
    return model


def _check_outputs(experiment: Experiment, shape: Shape, data: Arrays, where: str) -> None:
    """Raises an ExperimentError if a cost or metric cannot compare the outputs with the targets."""
    spec = experiment.model
    for cost in spec.costs:
        units = getattr(cost, "units", None)
        _check_units(cost, units, shape)
        if not getattr(cost, "of_batch", False):
            selected = _selected(units, shape)
            _check_targets(getattr(cost, "target", None) or spec.target, selected, data, cost.where if units else where)
            activation = spec.activation_of(cost)
            if selected[0] == 1 and cost.kind == "binary_cross_entropy" and activation == "softmax":
                raise ExperimentError(
                    f"{cost.where}: softmax of one unit is always 1, and has no cross-entropy: use logistic"
                )
            if selected[0] == 1 and cost.kind == "cross_entropy" and activation != "logistic":
                raise ExperimentError(
                    f"{cost.where}: cross_entropy of one unit is always 0: expected one for each class. For yes and no "
                    "use binary_cross_entropy, for other numbers sum_squared"
                )
    for metric in (metric for metrics in experiment.metrics_by_split().values() for metric in metrics):
        units = getattr(metric, "units", None)
        _check_units(metric, units, shape)
        selected = _selected(units, shape)
        _check_metric(metric, spec.target, selected, data)
        check = getattr(metric, "check", None)  # a user's metric may lack it
        if check is not None:
            rows = np.arange(min(len(data), _CHECKED))
            targets = data.take(rows, torch.float32)[0 if spec.target == "inputs" else 1]
            with errors_at(metric.where, metric.kind):
                check(torch.zeros(len(rows), *selected), targets, spec.activation_of(metric))


def _selected(units: tuple[int, int] | None, shape: Shape) -> Shape:
    """Returns the shape of the outputs that a cost or metric reads."""
    return shape if units is None else (units[1] - units[0], *shape[1:])


def _check_metric(metric: Options, target: str, shape: Shape, data: Arrays) -> None:
    """Raises an ExperimentError if a built-in metric cannot compare outputs of this shape with the targets."""
    of_classes = getattr(metric, "of_classes", False)
    if of_classes and not _has_classes(metric.kind, target, shape[0], data.targets):
        got = "inputs" if target == "inputs" else "numbers"
        raise ExperimentError(f"{metric.where}: {metric.kind} needs classes, and the targets are {got}: use mse or sse")
    if of_classes or getattr(metric, "compares", False):
        _check_targets(target, shape, data, f"{metric.where}: {metric.kind}")


def _has_classes(metric: str, target: str, units: int, targets: np.ndarray) -> bool:
    """Returns whether targets are classes: labels, or floats with a value for each of several units."""
    if target == "inputs" or targets.dtype.kind != "f":
        return target == "labels"
    if metric == "auc":  # binary, for one unit too
        return bool(np.isin(targets, (0, 1)).all())
    return targets.ndim == 2 and units > 1


def _check_units(reader: Options, units: tuple[int, int] | None, shape: Shape) -> None:
    split = getattr(reader, "split", None)
    count = shape[0] if units is None else units[1] - units[0]
    if units is not None and units[1] > shape[0]:
        raise ExperimentError(
            f"{reader.where}: {reader.kind}: expected units within 0 to {shape[0]}, the outputs of the model, got "
            f"{list(units)}"
        )
    if split is not None and split >= count:
        raise ExperimentError(f"{reader.where}: {reader.kind}: expected a split below {count} units, got {split}")


def _check_targets(target: str, shape: Shape, data: Arrays, where: str) -> None:
    if target == "inputs":
        if math.prod(shape) != math.prod(data.shape):
            raise ExperimentError(
                f"{where}: the outputs have shape {format_shape(shape)}, and should reconstruct inputs of "
                f"{format_shape(data.shape)}"
            )
        return
    if data.targets.dtype.kind == "f":
        if math.prod(shape) != math.prod(data.targets.shape[1:]):
            expected = format_shape(data.targets.shape[1:]) or "one number"
            raise ExperimentError(
                f"{where}: the outputs have shape {format_shape(shape)}, and the targets of {data.name} are {expected}"
            )
        return
    classes = int(data.targets.max()) + 1 if len(data.classes) == 0 else len(data.classes)
    if len(shape) != 1 or shape[0] < classes:
        raise ExperimentError(
            f"{where}: the outputs have shape {format_shape(shape)}, and {data.name} has {classes} classes: expected a "
            f"last layer with {classes} units"
        )


def _check_batch_norms(experiment: Experiment, model: nn.Module, data: Arrays, where: str) -> None:
    """Raises an ExperimentError if a batch of one sample would be normalised over one value: its variance is 0."""
    size = experiment.batch_size
    full, rest = divmod(len(data), size)
    smallest = size if full and (experiment.drop_last or not rest) else rest
    if smallest > 1:
        return
    single: list[str] = []

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel() == args[0].shape[1]:
            single.append(names[module])

    names: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, BatchNorm)
    }
    hooks = [module.register_forward_pre_hook(record) for module in names]
    output_shape(model, data.shape)
    for hook in hooks:
        hook.remove()
    if single:
        advice = "a larger one" if size == 1 else "another one, or `drop_last: true`"
        raise ExperimentError(
            f"{where}: {single[0]} cannot normalise a batch of one sample, and there is one: {len(data)} samples in "
            f"batches of batch_size {size}. Use {advice}"
        )


def load_data(experiment: Experiment, folder: str | None) -> Splits:
    """Returns the arrays of each split of the experiment's data set; `folder` is the value of --data.

    Raises:
        ExperimentError: if the data cannot be read, or the splits do not fit each other.
    """
    options = experiment.dataset
    where = options.where if folder is None else f"--data {folder}"
    try:
        splits = options.build(None if folder is None else expanded(folder), experiment.seed)
        _check_splits(splits)
        return splits
    except DatasetError as error:
        raise ExperimentError(f"{where}: {error}") from error
    except OSError as error:
        raise ExperimentError(f"{where}: {options.kind}: {error}") from error
    except MemoryError as error:
        raise ExperimentError(f"{where}: {options.kind} does not fit into memory: {error}") from error
    except (Exception, SystemExit) as error:  # raised by a user's data set
        with errors_at(where, options.kind):
            raise error


def _check_splits(splits: Splits) -> None:
    """Raises a DatasetError if shape, kind of targets or labels of a split differ from those of `train`."""
    train = splits["train"]
    for name, other in splits.items():
        if other.shape != train.shape:
            raise DatasetError(
                f"the {name} samples are {format_shape(other.shape)}, and the training samples "
                f"{format_shape(train.shape)}"
            )
        if (other.targets.dtype.kind, other.targets.shape[1:]) != (train.targets.dtype.kind, train.targets.shape[1:]):
            raise DatasetError(f"the {name} targets differ from the training targets in dtype or shape")
        if train.targets.dtype.kind == "i" and not train.classes and other.targets.max() > train.targets.max():
            raise DatasetError(
                f"the {name} samples have the label {other.targets.max()}, and the training samples only 0 to "
                f"{train.targets.max()}"
            )
