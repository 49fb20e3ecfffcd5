"""Converts neon's Balance model: a code of classes and a decorrelated code of style, which reconstruct the input.

In neon its three paths share layers. Here they are one list of layers with the outputs [classes, style,
reconstruction], and a cost for each of these groups of units.
"""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, at
from torchmn.experiment.neon.layers import ConvertedLayers, convert_layers, cost_target
from torchmn.experiment.neon.terms.values import check_cost, cost_of

PATHS = ("layers", "classlayers", "stylelayers")


def convert_balance(model: TaggedValue, converted: ConvertedLayers) -> tuple[list[TaggedValue], tuple[int, int]]:
    """Converts the layers of a Balance model.

    Args:
        model: the Balance model.
        converted: receives the layers; without layers so far.

    Returns:
        The costs, and the first and last + 1 of the units of the classes.
    """
    layers, classes, style = paths = [_path(model, key) for key in PATHS]
    at_branch = _branch_index(model, paths)
    branch = layers[at_branch]
    sublayers = (branch.get("sublayers") or at(branch.where, [])).value
    widths = [int(layer.number("nout", 0)) for layer in sublayers]
    index = next((k for k, layer in enumerate(sublayers) if layer is classes[-2]), None)
    if index is None or 0 in widths:
        raise ExperimentError(f"{branch.where}: the second to last of classlayers must be a layer of the branch")
    first, code = sum(widths[:index]), sum(widths)
    units = (first, first + widths[index])
    convert_layers(at(branch.where, layers[: at_branch + 1]), converted)
    decoder = converted.inside()
    convert_layers(at(branch.where, layers[at_branch + 1 : -1]), decoder)
    converted.include(decoder)
    batch_size = converted.batch_size
    for path, target in ((layers, "inputs"), (classes, "labels")):
        if cost_target(path[-1]) != target:
            raise ExperimentError(
                f"{path[-1].where}: {model.kind} is supported with ref_label: output for its layers, and targets for "
                "its classlayers"
            )
    joined = [at(branch.where, {"identity": {}}), at(branch.where, {"list": {"layers": decoder.layers}})]
    converted.layers.append(at(branch.where, {"branch": {"layers": joined}}))
    pixels = int(layers[-2].number("nout", 0))
    costs = [
        _cost(classes, batch_size, {"units": list(units), "target": "labels", "outputs": "probabilities"}),
        _cost(style, batch_size, {"units": [0, code]}),
        _cost(layers, batch_size, {"units": [code, code + pixels], "target": "inputs"}),
    ]
    return costs, units


def _branch_index(model: TaggedValue, paths: list[list[TaggedValue]]) -> int:
    """Returns the index of the BranchLayer in `layers`; raises an ExperimentError if the paths differ before it."""
    layers, _, style = paths
    at_branch = next((index for index, layer in enumerate(layers) if layer.name == "BranchLayer"), None)
    if at_branch is None or style[-2] is not layers[at_branch]:
        raise ExperimentError(
            f"{model.where}: {model.kind} is supported with one BranchLayer in layers, which must be the second to "
            "last of stylelayers"
        )
    for key, path in zip(PATHS[1:], paths[1:], strict=True):
        if len(path) != at_branch + 2 or any(a is not b for a, b in zip(path, layers[:at_branch], strict=False)):
            raise ExperimentError(
                f"{path[0].where}: {model.kind}: expected {key} to begin with aliases of the layers before the "
                "BranchLayer in layers"
            )
    return at_branch


def _path(model: TaggedValue, key: str) -> list[TaggedValue]:
    found = model.get(key)
    if (
        found is None
        or not isinstance(found.value, list)
        or len(found.value) < 3
        or found.value[-1].name != "CostLayer"
    ):
        raise ExperimentError(f"{model.where}: {model.kind} needs {key}, a list of layers that ends with a CostLayer")
    return found.value


def _cost(path: list[TaggedValue], batch_size: TaggedValue | None, options: dict[str, Any]) -> TaggedValue:
    found = path[-1].get("cost")
    if found is None:
        raise ExperimentError(f"{path[-1].where}: CostLayer needs the key 'cost'")
    check_cost(found, path[-2])
    cost = cost_of(found, batch_size)
    named = cost.value if isinstance(cost.value, dict) else {"name": cost}
    if found.name != "CrossEntropy":
        options = {key: value for key, value in options.items() if key != "outputs"}
    return at(found.where, {**named, **options})
