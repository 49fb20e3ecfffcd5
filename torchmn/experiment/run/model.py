"""The whole model of an experiment, the same on every rank."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm
from torchmn.datasets import Arrays, DatasetError
from torchmn.errors import ExperimentError
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.datasets import Splits
from torchmn.experiment.vocabulary.layers.boltzmann import Boltzmann, machines
from torchmn.experiment.vocabulary.layers.build import chain, naming, output_shape, random_numbers_from
from torchmn.experiment.vocabulary.layers.options import Shape, text
from torchmn.experiment.vocabulary.schema import Experiment


def build_model(experiment: Experiment, data: Arrays) -> nn.Module:
    """The experiment's model for samples such as those of `data`, with the initial weights of its seed.

    It is made in float32 and converted, so that a run in float64 begins with the same weights.
    """
    spec = experiment.the_model()
    experiment.readers()  # which raises where the activation of one is unclear
    with random_numbers_from(experiment.seed):
        if spec.layers:
            model: nn.Module = chain(spec.layers, data.shape)
            where = spec.layers[-1].where
        else:
            built = spec.module or spec.autoencoder
            where = built.where
            with naming(where, "module" if spec.module else "autoencoder", data.shape):
                model = built.build(data.shape)
                output_shape(model, data.shape)
        with naming(where, f"the model in {experiment.dtype}", data.shape):
            model.to(experiment.torch_dtype())
            shape = output_shape(model, data.shape)
        _check_outputs(experiment, shape, data, where)
        _check_batch_norms(experiment, model, data, where)
    if len(machines(model)) < sum(isinstance(module, Boltzmann) for module in model.modules()):
        raise ExperimentError(f"{where}: rbm must stand in the model's own list of layers, not inside of another layer")
    return model


def _check_outputs(experiment: Experiment, shape: Shape, data: Arrays, where: str) -> None:
    """Raise where outputs can not be compared with targets."""
    spec = experiment.the_model()
    for cost in spec.costs:
        units = getattr(cost, "units", None)
        _check_units(cost, units, shape)
        if not getattr(cost, "of_batch", False):
            some = shape if units is None else (units[1] - units[0], *shape[1:])
            _check_targets(getattr(cost, "target", None) or spec.target, some, data, cost.where if units else where)
            activation = spec.activation_of(cost)
            if some[0] == 1 and cost.kind == "binary_cross_entropy" and activation == "softmax":
                raise ExperimentError(
                    f"{cost.where}: softmax of one unit is always 1, and has no cross-entropy: take logistic"
                )
            if some[0] == 1 and cost.kind == "cross_entropy" and activation != "logistic":
                raise ExperimentError(
                    f"{cost.where}: cross_entropy of one unit is always 0: expected one for each class. For yes and no "
                    "take binary_cross_entropy, for other numbers sum_squared"
                )
    for metric in (metric for some in experiment.the_metrics().values() for metric in some):
        units = getattr(metric, "units", None)
        _check_units(metric, units, shape)
        _check_compared(metric, spec.target, shape if units is None else (units[1] - units[0], *shape[1:]), data)


def _check_compared(metric: Options, target: str, shape: Shape, data: Arrays) -> None:
    """Raise where a metric of ours can not compare outputs of this shape with the targets; others know themselves."""
    of_classes = getattr(metric, "of_classes", False)
    if of_classes and not _has_classes(metric.kind, target, shape[0], data.targets):
        got = "inputs" if target == "inputs" else "numbers"
        raise ExperimentError(
            f"{metric.where}: {metric.kind} is about classes, and the targets are {got}: use mse or sse"
        )
    if of_classes or getattr(metric, "compares", False):
        _check_targets(target, shape, data, f"{metric.where}: {metric.kind}")


def _has_classes(metric: str, target: str, units: int, targets: np.ndarray) -> bool:
    """Whether targets stand for classes: labels, or floats with a value for each of several units."""
    if target == "inputs" or targets.dtype.kind != "f":
        return target == "labels"
    if metric == "auc":  # of yes and no, for one unit too
        return bool(np.isin(targets, (0, 1)).all())
    return targets.ndim == 2 and units > 1


def _check_units(reader: Options, units: tuple[int, int] | None, shape: Shape) -> None:
    split = getattr(reader, "split", None)
    among = shape[0] if units is None else units[1] - units[0]
    if units is not None and units[1] > shape[0]:
        raise ExperimentError(f"{reader.where}: {reader.kind}: there are no units {list(units)} among {shape[0]}")
    if split is not None and split >= among:
        raise ExperimentError(f"{reader.where}: {reader.kind}: a split at {split} leaves nothing of {among} units")


def _check_targets(target: str, shape: Shape, data: Arrays, where: str) -> None:
    if target == "inputs":
        if math.prod(shape) != math.prod(data.shape):
            raise ExperimentError(
                f"{where}: the outputs have shape {text(shape)}, and should reconstruct inputs of {text(data.shape)}"
            )
        return
    if data.targets.dtype.kind == "f":
        if math.prod(shape) != math.prod(data.targets.shape[1:]):
            wanted = text(data.targets.shape[1:]) or "one number"
            raise ExperimentError(
                f"{where}: the outputs have shape {text(shape)}, and the targets of {data.name} are {wanted}"
            )
        return
    classes = int(data.targets.max()) + 1 if len(data.classes) == 0 else len(data.classes)
    if len(shape) != 1 or shape[0] < classes:
        raise ExperimentError(
            f"{where}: the outputs have shape {text(shape)}, and {data.name} has {classes} classes: expected a last "
            f"layer with {classes} units"
        )


def _check_batch_norms(experiment: Experiment, model: nn.Module, data: Arrays, where: str) -> None:
    """Raise where a batch of one sample would be normalised over one value: its variance is 0, its output always 0."""
    size = experiment.batch_size
    full, rest = divmod(len(data), size)
    smallest = size if full and (experiment.drop_last or not rest) else rest
    if smallest > 1:
        return
    single: list[str] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel() == args[0].shape[1]:
            single.append(names[module])

    names: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, BatchNorm)
    }
    hooks = [module.register_forward_pre_hook(note) for module in names]
    output_shape(model, data.shape)
    for hook in hooks:
        hook.remove()
    if single:
        way_out = "a larger one" if size == 1 else "another one, or `drop_last: true`"
        raise ExperimentError(
            f"{where}: {single[0]} can not normalise a batch of one sample, and there is one: {len(data)} samples in "
            f"batches of batch_size {size}. Choose {way_out}"
        )


def load_data(experiment: Experiment, folder: str | None) -> Splits:
    """The arrays of each split of the experiment's data set; `folder` is what --data says."""
    options = experiment.the_dataset()
    where = options.where if folder is None else f"--data {folder}"
    try:
        splits = options.build(None if folder is None else Path(folder).expanduser(), experiment.seed)
        _check_splits(splits)
        return splits
    except DatasetError as error:
        raise ExperimentError(f"{where}: {error}") from error
    except OSError as error:
        raise ExperimentError(f"{where}: {options.kind}: {error}") from error
    except MemoryError as error:
        raise ExperimentError(f"{where}: {options.kind} does not fit into memory: {error}") from error
    except (Exception, SystemExit) as error:  # of a data set of a user's own
        with naming(where, options.kind):
            raise error


def _check_splits(splits: Splits) -> None:
    """Raise a DatasetError where a split does not belong to the training samples."""
    train = splits["train"]
    for name, other in splits.items():
        if other.shape != train.shape:
            raise DatasetError(
                f"the {name} samples are {text(other.shape)}, and the training samples {text(train.shape)}"
            )
        if (other.targets.dtype.kind, other.targets.shape[1:]) != (train.targets.dtype.kind, train.targets.shape[1:]):
            raise DatasetError(f"the {name} targets are of another kind than the training targets")
        if train.targets.dtype.kind == "i" and not train.classes and other.targets.max() > train.targets.max():
            most, known = other.targets.max(), train.targets.max()
            raise DatasetError(f"the {name} samples have the label {most}, and the training samples only 0 to {known}")
