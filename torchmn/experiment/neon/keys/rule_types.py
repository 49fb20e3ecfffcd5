"""The types of neon's learning rules, and their classes before its release."""

from __future__ import annotations

from torchmn.experiment.file.tagged_value import TaggedValue

RULE_CLASSES = {
    "GradientDescent": "gradient_descent", "GradientDescentPretrain": "gradient_descent_pretrain",
    "GradientDescentMomentum": "gradient_descent_momentum",
    "GradientDescentMomentumWeightDecay": "gradient_descent_momentum_weight_decay", "AdaDelta": "adadelta",
    "RMSProp": "rmsprop",
}  # fmt: skip


def rule_type(rule: TaggedValue) -> str | None:
    """Returns the type of a learning rule: `{type: adadelta, ...}`, before neon's release `!obj:...AdaDelta {...}`."""
    return rule.string("type") if rule.kind is None else RULE_CLASSES.get(rule.name, rule.kind)
