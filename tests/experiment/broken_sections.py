"""Invalid experiment files with their error messages: data sets, optimizers, metrics and other sections."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

from tests.experiment.files import BASE, swap

__all__ = ["BROKEN"]

# What is wrong, the file, and the message after the file's name; {cwd} is the current directory.
BROKEN = [
    (
        "unknown top key",
        swap("optimizer:", "optimiser:"),
        "8:1: the file has no key 'optimiser'. Did you mean 'optimizer'?",
    ),
    ("misspelled epochs", swap("epochs:", "epoch:"), "9:1: the file has no key 'epoch'. Did you mean 'epochs'?"),
    (
        "missing model",
        "dataset: mnist\noptimizer: {name: sgd, lr: 0.1}\nepochs: 1\nbatch_size: 5\n",
        "1:1: the file must have the key 'model': layers and cost",
    ),
    (
        "missing batch size",
        swap("batch_size: 50\n", ""),
        "1:1: the file must have the key 'batch_size': number of samples in a step, on all ranks together",
    ),
    ("unknown dataset", swap("name: mnist", "name: mnits"), "1:17: there is no dataset 'mnits'. Did you mean 'mnist'?"),
    (
        "dataset number",
        swap("{name: mnist, sample: 10%}", "7"),
        "1:10: expected dataset to be the name of a dataset, or a mapping with `name`, got 7",
    ),
    (
        "dataset no name",
        swap("{name: mnist, sample: 10%}", "{sample: 10%}"),
        "1:10: expected dataset to be the name of a dataset, or a mapping with `name`, got a mapping without it",
    ),
    ("dataset key", swap("sample: 10%", "samples: 10%"), "1:24: mnist has no key 'samples'. Did you mean 'sample'?"),
    (
        "sample 10",
        swap("sample: 10%", "sample: 10"),
        "1:32: expected mnist's sample to be a fraction of the data, such as 10% or 0.1, got 10",
    ),
    (
        "sample 0%",
        swap("sample: 10%", "sample: 0%"),
        "1:32: expected mnist's sample to be a fraction of the data, such as 10% or 0.1, got '0%'",
    ),
    (
        "sample 200%",
        swap("sample: 10%", "sample: 200%"),
        "1:32: expected mnist's sample to be a fraction of the data, such as 10% or 0.1, got '200%'",
    ),
    (
        "sample word",
        swap("sample: 10%", "sample: ten%"),
        "1:32: expected mnist's sample to be a fraction of the data, such as 10% or 0.1, got 'ten%'",
    ),
    (
        "dataset missing dir",
        swap("sample: 10%", "path: /nowhere/at/all"),
        "1:10: root '/nowhere/at/all' is not a directory; expected a directory with MNIST's IDX files.",
    ),
    (
        "cifar no path",
        swap("name: mnist, sample: 10%", "name: cifar10"),
        "1:10: cifar10: no directory given. Pass --data DIR/cifar-10-batches-bin, or set dataset: {name: cifar10, path: ...}.",
    ),
    (
        "random no shape",
        swap("name: mnist, sample: 10%", "name: random"),
        "1:10: random needs the key 'shape': the shape of a sample, such as [3, 32, 32]",
    ),
    (
        "random shape",
        swap("name: mnist, sample: 10%", "name: random, shape: [1, 0]"),
        "1:32: expected random's shape to be the shape of a sample, such as [1, 28, 28], got [1, 0]",
    ),
    (
        "unknown cost",
        swap("cross_entropy", "crossentropy_loss"),
        "7:9: there is no cost 'crossentropy_loss'. Did you mean 'cross_entropy'?",
    ),
    (
        "cost missing",
        swap("  cost: cross_entropy\n", ""),
        "3:3: model needs the key 'cost': what training minimises, such as cross_entropy",
    ),
    ("unknown optimizer", swap("sgd", "sdg"), "8:19: there is no optimizer 'sdg'. Did you mean 'sgd'?"),
    ("lr missing", swap(", lr: 0.1", ""), "8:12: sgd needs the key 'lr': the learning rate"),
    ("lr text", swap("lr: 0.1", "lr: fast"), "8:28: expected sgd's lr to be a number, got 'fast'"),
    ("lr negative", swap("lr: 0.1", "lr: -0.1"), "8:28: expected sgd's lr to be at least 0, got -0.1"),
    ("lr infinite", swap("lr: 0.1", "lr: .inf"), "8:28: expected sgd's lr to be a finite number, got inf"),
    (
        "momentum 1",
        swap("lr: 0.1", "lr: 0.1, momentum: 1.5"),
        "8:43: expected sgd's momentum to be less than 1, got 1.5",
    ),
    ("momentum ramp", swap("lr: 0.1", "lr: 0.1, momentum: {from: 0.5, end: 5}"), "8:43: momentum needs the key 'to'"),
    (
        "schedule",
        swap("lr: 0.1", "lr: 0.1, schedule: {steps: [1]}"),
        "8:44: schedule has no key 'steps'. Did you mean 'step'?",
    ),
    (
        "schedule two",
        swap("lr: 0.1", "lr: 0.1, schedule: {step: [1], cosine: 0}"),
        "8:43: schedule has step and cosine: expected one of step, every, exponential, linear, cosine, or the name of a torch class",
    ),
    ("schedule list", swap("lr: 0.1", "lr: 0.1, schedule: {step: 3}"), "8:50: expected step to be a list, got 3"),
    ("epochs 0", swap("epochs: 1", "epochs: 0"), "9:9: expected epochs to be at least 1, got 0"),
    ("epochs none", swap("epochs: 1", "epochs:"), "9:8: expected epochs to be an integer, got nothing"),
    (
        "batch float",
        swap("batch_size: 50", "batch_size: 5.0"),
        "10:13: expected batch_size to be an integer, got 5.0",
    ),
    ("seed negative", BASE + "seed: -1\n", "11:7: expected seed to be at least 0, got -1"),
    (
        "metric unknown",
        BASE + "metrics: [missclassified]\n",
        "11:11: there is no metric 'missclassified'. Did you mean 'misclassified'?",
    ),
    ("metrics word", BASE + "metrics: accuracy\n", "11:10: expected metrics to be a list of metrics, got 'accuracy'"),
    (
        "metric option",
        BASE + "metrics:\n  - {name: accuracy, top: 0}\n",
        "12:27: expected accuracy's top to be at least 1, got 0",
    ),
    (
        "mode",
        BASE + "parallel: {mode: halopr}\n",
        "11:18: expected mode to be one of datapar, modelpar, vecpar, halopar, halodatapar, hybrid, got 'halopr'. Did you mean 'halopar'?",
    ),
    (
        "grid",
        BASE + "parallel: {mode: halopar, grid: {hieght: 2}}\n",
        "11:34: grid has no key 'hieght'. Did you mean 'height'?",
    ),
    (
        "grid zero",
        BASE + "parallel: {mode: halopar, grid: {height: 0}}\n",
        "11:42: expected height to be at least 1, got 0",
    ),
    (
        "dtype",
        BASE + "dtype: float16\n",
        "11:8: expected dtype to be one of float32, float64, got 'float16'. Did you mean 'float64'?",
    ),
    (
        "predictions",
        BASE + "predictions: [tset]\n",
        "11:15: expected predictions to be one of train, validation, test, got 'tset'. Did you mean 'test'?",
    ),
    (
        "imports",
        BASE + "imports: [no_such_module_here]\n",
        "11:11: cannot import no_such_module_here from {cwd} (ModuleNotFoundError: No module named 'no_such_module_here')",
    ),
    ("shuffle", BASE + "shuffle: sometimes\n", "11:10: expected shuffle to be true or false, got 'sometimes'"),
]
