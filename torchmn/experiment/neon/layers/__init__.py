"""Converts neon's layers.

Reading order: `converted` (the result), `weights` (what layers with weights have in common), `images`, `table` (all
classes).
"""

from torchmn.experiment.neon.layers.converted import ConvertedLayers
from torchmn.experiment.neon.layers.table import LAYERS, convert_layers, cost_target
from torchmn.experiment.neon.layers.weights import rule_of

__all__ = ["LAYERS", "ConvertedLayers", "convert_layers", "cost_target", "rule_of"]
