"""Invalid experiment files with their error messages: known keys without values, or that exclude each other."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

from tests.experiment.files import BASE, swap

__all__ = ["BROKEN"]

NOTHING = [
    ("dataset", swap("{name: mnist, sample: 10%}", ""), "1:9: expected dataset to be the name of a dataset, or a mapping with `name`, got nothing"),
    ("model", BASE[: BASE.index("model:")] + "model:\n" + BASE[BASE.index("optimizer:") :], "2:7: expected model to be a mapping of keys to values, got nothing"),
    ("cost", swap("cost: cross_entropy", "cost:"), "7:8: expected cost to be the name of a cost, or a mapping with `name`, got nothing"),
    ("optimizer", swap("{name: sgd, lr: 0.1}", ""), "8:11: expected optimizer to be the name of an optimizer, or a mapping with `name`, got nothing"),
    ("layers of a branch", swap("max_pool: {kernel: 2}", "branch: {layers: }"), "5:23: expected layers to be a list of layers, such as `- conv: {maps: 20, kernel: 5}`, got nothing"),
]  # fmt: skip

OPTIMIZERS = [
    ("schedule without its value", swap("lr: 0.1", "lr: 0.1, schedule: cosine"), "8:43: schedule 'cosine' needs a value, such as {cosine: 0.0}"),
    ("schedule with nothing", swap("lr: 0.1", "lr: 0.1, schedule: {step}"), "8:43: schedule 'step' needs a value, such as {step: [5, 8], ratio: 0.1}"),
    ("schedule misspelled", swap("lr: 0.1", "lr: 0.1, schedule: cosin"), "8:43: schedule 'cosin' is unknown. Did you mean 'cosine'?"),
    ("a ratio that does nothing", swap("lr: 0.1", "lr: 0.1, schedule: {cosine: 0.0, ratio: 0.5}"), "8:43: schedule has ratio with cosine: expected ratio with step or every only"),
    ("nesterov that does nothing", swap("lr: 0.1", "lr: 0.1, nesterov: true"), "8:12: sgd has nesterov, which needs a momentum, such as 0.9, and no dampening"),
    ("nesterov and dampening", swap("lr: 0.1", "lr: 0.1, nesterov: true, momentum: 0.9, dampening: 0.5"), "8:12: sgd has nesterov, which needs a momentum, such as 0.9, and no dampening"),
    ("a ramp backwards", swap("lr: 0.1", "lr: 0.1, momentum: {from: 0.5, to: 0.9, start: 5, end: 2}"), "8:43: momentum ends at epoch 2, before it starts at 5"),
    ("betas", swap("sgd, lr: 0.1", "adam, betas: [0.1, 0.2, 0.3]"), "8:32: expected adam's betas to be a list of at most 2 items, got [0.1, 0.2, 0.3]"),
]  # fmt: skip

KEYS = [
    ("a number as a key", BASE + "3: x\n", "11:1: expected names as the keys of the file, got 3"),
    ("a number as an option", swap("sample: 10%", "3: x"), "1:24: expected names as the keys of mnist, got 3"),
]
IMPORTS = [  # reported alone, without the names that the module should have registered
    ("imports and its words", swap("max_pool:", "my_pool:") + "imports: [no_such_module_here]\n", "11:11: cannot import no_such_module_here from {cwd} (ModuleNotFoundError: No module named 'no_such_module_here')"),
]  # fmt: skip

AUTOENCODER = BASE.splitlines()
AUTOENCODER[2:6] = ["  autoencoder: {sparsity: -1}"]
PARTS = [  # reported alone, without "model has no layers"
    ("an autoencoder", "\n".join(AUTOENCODER), "3:27: expected sparsity to be at least 0, got -1"),
]
RECONSTRUCTION = swap("units: 10", "units: 784").replace("cost: cross_entropy", "cost: sum_squared\n  target: inputs")
NORMALISED = swap("{units: 10}", "{units: 10, batch_norm: true}")
MEANINGS = [
    *(
        (f"{metric} of a reconstruction", RECONSTRUCTION + f"metrics: [{metric}]\n", f"12:11: {metric} needs classes, and the targets are inputs: use mse or sse")
        for metric in ("accuracy", "misclassified", "log_loss", "auc")
    ),
    ("a metric of too few units", BASE + "metrics: [{name: misclassified, units: [2, 4]}]\n", "11:11: misclassified: the outputs have shape 2, and mnist train sample has 10 classes: expected a last layer with 10 units"),
    ("squares of too few units", BASE + "metrics: [{name: mse, units: [0, 4]}]\n", "11:11: mse: the outputs have shape 4, and mnist train sample has 10 classes: expected a last layer with 10 units"),
    ("cross entropy of one unit", swap("{name: mnist, sample: 10%}", "{name: random, shape: [1, 9, 9], classes: 1}").replace("units: 10", "units: 1"), "7:9: cross_entropy of one unit is always 0: expected one for each class. For yes and no use binary_cross_entropy, for other numbers sum_squared"),
    ("a last batch of one", NORMALISED.replace("batch_size: 50", "batch_size: 599"), "6:15: linear1_norm cannot normalise a batch of one sample, and there is one: 600 samples in batches of batch_size 599. Use another one, or `drop_last: true`"),
    ("batches of one", NORMALISED.replace("batch_size: 50", "batch_size: 1"), "6:15: linear1_norm cannot normalise a batch of one sample, and there is one: 600 samples in batches of batch_size 1. Use a larger one"),
    ("classes out of a branch", swap("linear: {units: 10}", "branch: [linear: {units: 4, activation: softmax}, linear: 6]"), "7:9: cross_entropy of a branch: set `outputs: scores`, or `outputs: probabilities` if they are outputs of softmax or logistic"),
    ("too many random numbers", swap("{name: mnist, sample: 10%}", "{name: random, shape: [1000000000000, 3]}"), "1:10: random: 1000 samples of shape (1000000000000, 3) are too many values to generate"),
]  # fmt: skip

BROKEN = [*NOTHING, *OPTIMIZERS, *KEYS, *IMPORTS, *PARTS, *MEANINGS]
