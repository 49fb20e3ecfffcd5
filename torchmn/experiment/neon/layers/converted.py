"""ConvertedLayers: the result of converting a list of layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, at, plain
from torchmn.experiment.neon.terms.rules import LayerRules
from torchmn.experiment.neon.terms.shapes import Shape


@dataclass
class ConvertedLayers:
    """The result of converting a list of layers.

    Attributes:
        layers: converted layers.
        rules: the options of each layer with weights, and its optimizers.
        last: neon's layer before the cost.
        cost: of a CostLayer.
        target: "labels" or "inputs".
        notes: a line for each key without effect.
        batch_size: of the model.
        default_rule: optimizer of layers without a learning rule.
        momentum: the model's options of momentum, for layers with a learning rate and no learning rule.
        used: keys of the model that optimizers have used.
        shape: of a sample after the last layer so far; None if unknown.
        pretrained: whether the model is pretrained.
    """

    layers: list[TaggedValue] = field(default_factory=list)
    rules: list[tuple[TaggedValue, LayerRules]] = field(default_factory=list)
    last: TaggedValue | None = None
    cost: TaggedValue | None = None
    target: str = "labels"
    notes: list[str] = field(default_factory=list)
    batch_size: TaggedValue | None = None
    default_rule: TaggedValue | None = None
    momentum: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    shape: Shape | None = None
    pretrained: bool = False

    def inside(self) -> ConvertedLayers:
        """Returns an empty result for layers inside another layer, with the same model and inputs."""
        return replace(self, layers=[], rules=[], notes=[])

    def include(self, inner: ConvertedLayers) -> None:
        """Adds the optimizers and notes of layers inside another layer."""
        self.rules += inner.rules
        self.notes += inner.notes


def check_batch_size(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Raises an ExperimentError if a layer has another batch size than the model."""
    found, expected = layer.get("batch_size"), converted.batch_size
    if found is not None and expected is not None and plain(found) != plain(expected):
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected batch_size to be that of the model, {plain(expected)}, got "
            f"{plain(found)}"
        )


def add(
    converted: ConvertedLayers, layer: TaggedValue, kind: str, options: dict[str, Any], rule: LayerRules | None = None
) -> None:
    """Adds a converted layer, and its learning rules if it has weights."""
    new = at(layer.where, options)
    converted.layers.append(at(layer.where, {kind: new}))
    if rule is not None:
        converted.rules.append((new, rule))
