"""neon's Balance model: a code of classes beside a code of the rest, kept apart, which reconstruct the input together.

Its three paths share layers. Here they are one chain, whose outputs are [classes, rest, reconstruction], with a cost
of each of these units.
"""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.layers import Chain, convert_layers, cost_target
from torchmn.experiment.neon.tagged_value import Said, at
from torchmn.experiment.neon.values import cost_of

PATHS = ("layers", "classlayers", "stylelayers")


def convert_balance(model: Said, chain: Chain) -> tuple[list[Said], tuple[int, int]]:
    """Adds the layers to the empty chain. Returns its costs, and the units of the classes."""
    paths = [_path(model, key) for key in PATHS]
    layers, classes, style = paths
    at_branch = next((place for place, layer in enumerate(layers) if layer.name == "BranchLayer"), None)
    if at_branch is None or style[-2] is not layers[at_branch]:
        raise ExperimentError(
            f"{model.where}: {model.kind} is supported with one BranchLayer among its layers, which is the last but "
            "one of its stylelayers"
        )
    for key, path in zip(PATHS[1:], paths[1:], strict=True):
        if len(path) != at_branch + 2 or any(a is not b for a, b in zip(path, layers[:at_branch], strict=False)):
            raise ExperimentError(
                f"{path[0].where}: {model.kind}: expected {key} to begin with the very layers that stand before the "
                "BranchLayer in layers, as aliases of them"
            )
    branch = layers[at_branch]
    parts = (branch.get("sublayers") or at(branch.where, [])).value
    widths = [int(part.number("nout", 0)) for part in parts]
    place = next((k for k, part in enumerate(parts) if part is classes[-2]), None)
    if place is None or 0 in widths:
        raise ExperimentError(f"{branch.where}: the last but one of classlayers must be a layer of the branch")
    first, code = sum(widths[:place]), sum(widths)
    units = (first, first + widths[place])
    convert_layers(at(branch.where, layers[: at_branch + 1]), chain)
    decoder = Chain(batch_size=chain.batch_size, default_rule=chain.default_rule, shape=chain.shape)
    convert_layers(at(branch.where, layers[at_branch + 1 : -1]), decoder)
    chain.rules += [(-1, rule) for _, rule in decoder.rules]
    chain.notes += decoder.notes
    batch_size = chain.batch_size
    for path, target in ((layers, "inputs"), (classes, "labels")):
        if cost_target(path[-1]) != target:
            raise ExperimentError(
                f"{path[-1].where}: {model.kind} is supported with ref_label: output for its layers, and targets for "
                "its classlayers"
            )
    joined = [at(branch.where, {"identity": {}}), at(branch.where, {"list": {"layers": decoder.layers}})]
    chain.layers.append(at(branch.where, {"branch": {"layers": joined}}))
    pixels = int(layers[-2].number("nout", 0))
    costs = [
        _cost(classes[-1], batch_size, {"units": list(units), "target": "labels", "outputs": "probabilities"}),
        _cost(style[-1], batch_size, {"units": [0, code]}),
        _cost(layers[-1], batch_size, {"units": [code, code + pixels], "target": "inputs"}),
    ]
    return costs, units


def _path(model: Said, key: str) -> list[Said]:
    found = model.get(key)
    if (
        found is None
        or not isinstance(found.value, list)
        or len(found.value) < 3
        or found.value[-1].name != "CostLayer"
    ):
        raise ExperimentError(f"{model.where}: {model.kind} needs {key}, a list of layers that ends with a CostLayer")
    return found.value


def _cost(layer: Said, batch_size: Said | None, about: dict[str, Any]) -> Said:
    found = layer.get("cost")
    if found is None:
        raise ExperimentError(f"{layer.where}: CostLayer needs the key 'cost'")
    ours = cost_of(found, batch_size)
    named = ours.value if isinstance(ours.value, dict) else {"name": ours}
    return at(
        found.where,
        {
            **named,
            **{key: value for key, value in about.items() if key != "outputs"},
            **({"outputs": about["outputs"]} if "outputs" in about and found.name == "CrossEntropy" else {}),
        },
    )
