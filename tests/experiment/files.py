"""A small experiment file, and changes to it."""

from __future__ import annotations

BASE = """\
dataset: {name: mnist, sample: 10%}
model:
  layers:
    - conv: {maps: 4, kernel: 5, activation: relu}
    - max_pool: {kernel: 2}
    - linear: {units: 10}
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1}
epochs: 1
batch_size: 50
"""


def swap(old: str, new: str) -> str:
    """Returns the file with one replacement."""
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)
