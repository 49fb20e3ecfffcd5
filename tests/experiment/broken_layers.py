"""Invalid experiment files with their error messages: models and layers."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

from tests.experiment.files import swap

__all__ = ["BROKEN"]

# What is wrong, the file, and the message after the file's name; {cwd} is the current directory.
BROKEN = [
    ("unknown layer", swap("- conv:", "- cnov:"), "4:7: there is no layer 'cnov'. Did you mean 'conv'?"),
    (
        "layer two keys",
        swap("- max_pool: {kernel: 2}", "- {max_pool: 2, linear: 3}"),
        "5:7: expected one layer, such as `conv: {maps: 20, kernel: 5}`, got the keys max_pool, linear",
    ),
    (
        "layer number",
        swap("- max_pool: {kernel: 2}", "- 5"),
        "5:7: expected one layer, such as `conv: {maps: 20, kernel: 5}`, got 5",
    ),
    (
        "layers mapping",
        "dataset: mnist\nmodel:\n  layers: {conv: 3}\n  cost: cross_entropy\noptimizer: {name: sgd, lr: 0.1}\nepochs: 1\nbatch_size: 5\n",
        "3:11: expected layers to be a list of layers, such as `- conv: {maps: 20, kernel: 5}`, got a mapping",
    ),
    (
        "layers empty",
        "dataset: mnist\nmodel:\n  layers: []\n  cost: cross_entropy\noptimizer: {name: sgd, lr: 0.1}\nepochs: 1\nbatch_size: 5\n",
        "3:11: expected layers to be a list of layers, such as `- conv: {maps: 20, kernel: 5}`, got an empty list",
    ),
    ("layer unknown key", swap("maps: 4", "map: 4"), "4:14: conv has no key 'map'. Did you mean 'maps'?"),
    ("maps text", swap("maps: 4", "maps: four"), "4:20: expected conv's maps to be an integer, got 'four'"),
    ("maps zero", swap("maps: 4", "maps: 0"), "4:20: expected conv's maps to be at least 1, got 0"),
    ("maps float", swap("maps: 4", "maps: 4.5"), "4:20: expected conv's maps to be an integer, got 4.5"),
    ("maps bool", swap("maps: 4", "maps: true"), "4:20: expected conv's maps to be an integer, got true"),
    (
        "kernel zero",
        swap("kernel: 5", "kernel: 0"),
        "4:31: expected conv's kernel to be an integer of at least 1, or a list with one per dim, got 0",
    ),
    (
        "kernel text",
        swap("kernel: 5", "kernel: 5x5"),
        "4:31: expected conv's kernel to be an integer of at least 1, or a list with one per dim, got '5x5'",
    ),
    (
        "kernel three dims",
        swap("kernel: 5", "kernel: [5, 5, 5]"),
        "4:13: conv1: expected kernel to have 2 numbers, one per spatial dim, got 3",
    ),
    (
        "kernel too large",
        swap("kernel: 5", "kernel: 29"),
        "4:13: conv1: a kernel of 29 does not fit into an image of 28 x 28",
    ),
    (
        "padding word",
        swap("kernel: 5", "kernel: 5, padding: sane"),
        "4:43: expected conv's padding to be an integer of at least 0, or a list with one per dim, or 'same', got 'sane'",
    ),
    (
        "same with stride",
        swap("kernel: 5", "kernel: 5, padding: same, stride: 2"),
        "4:13: conv1: padding: same needs an odd kernel and stride 1",
    ),
    (
        "groups",
        swap("kernel: 5", "kernel: 5, groups: 3"),
        "4:13: conv1: groups: 3 does not divide the input's number of maps, 1",
    ),
    (
        "padding mode",
        swap("kernel: 5", "kernel: 5, padding_mode: zero"),
        "4:48: expected conv's padding_mode to be one of zeros, reflect, replicate, circular, got 'zero'. Did you mean 'zeros'?",
    ),
    (
        "conv after linear",
        swap("- max_pool: {kernel: 2}", "- linear: 5\n    - conv: {maps: 2, kernel: 3}"),
        "6:13: conv2: conv needs images of shape (maps, height, width), got samples of shape 5",
    ),
    (
        "pool too large",
        swap("kernel: 2", "kernel: 30"),
        "5:17: max_pool1: a kernel of 30 does not fit into an image of 24 x 24",
    ),
    (
        "pool padding",
        swap("kernel: 2", "kernel: 2, padding: 2"),
        "5:17: max_pool1: padding 2 is more than half the kernel 2",
    ),
    ("unknown activation", swap("relu", "rleu"), "4:46: there is no activation 'rleu'. Did you mean 'relu'?"),
    (
        "activation number",
        swap("relu", "3"),
        "4:46: expected activation to be the name of an activation, or a mapping with `name`, got 3",
    ),
    (
        "activation option",
        swap("activation: relu", "activation: {name: leaky_relu, slop: 0.1}"),
        "4:65: leaky_relu has no key 'slop'. Did you mean 'slope'?",
    ),
    (
        "unknown init",
        swap("activation: relu", "init: gausian"),
        "4:40: there is no initializer 'gausian'. Did you mean 'gaussian'?",
    ),
    (
        "init std",
        swap("activation: relu", "init: {name: gaussian, std: -1}"),
        "4:62: expected gaussian's std to be more than 0, got -1",
    ),
    (
        "dropout rate",
        swap("- max_pool: {kernel: 2}", "- dropout: 1.5"),
        "5:16: expected dropout's rate to be less than 1, got 1.5",
    ),
    (
        "dropout both",
        swap("- max_pool: {kernel: 2}", "- dropout: {rate: 0.5, keep: 0.5}"),
        "5:16: dropout has both rate and keep: expected one of them",
    ),
    (
        "units missing",
        swap("{units: 10}", "{bias: true}"),
        "6:15: linear needs the key 'units': number of outputs",
    ),
    (
        "too few units",
        swap("units: 10", "units: 5"),
        "6:15: the outputs have shape 5, and mnist train sample has 10 classes: expected a last layer with 10 units",
    ),
    (
        "outputs an image",
        swap("    - linear: {units: 10}\n", ""),
        "5:17: the outputs have shape 4 x 12 x 12, and mnist train sample has 10 classes: expected a last layer with 10 units",
    ),
    (
        "lstm on image",
        swap("- max_pool: {kernel: 2}", "- lstm: {units: 4}"),
        "5:13: lstm1: lstm needs sequences of shape (time, features), got samples of shape 4 x 24 x 24",
    ),
    (
        "reshape",
        swap("- max_pool: {kernel: 2}", "- reshape: [5, 5]"),
        "5:16: reshape1: cannot reshape a sample of 4 x 24 x 24, 2304 values, to 5 x 5, 25 values",
    ),
    (
        "branch shapes",
        swap("- max_pool: {kernel: 2}", "- branch:\n        - conv: {maps: 2, kernel: 3}\n        - max_pool: 2"),
        "6:9: branch1: outputs of shapes 2 x 22 x 22, 4 x 12 x 12 cannot be joined by concat",
    ),
    (
        "in branch",
        swap("- max_pool: {kernel: 2}", "- branch:\n        - list:\n            - conv: {maps: 2, kernl: 3}"),
        "7:31: conv has no key 'kernl'. Did you mean 'kernel'?",
    ),
    (
        "own module",
        swap("- max_pool: {kernel: 2}", "- module: no_such_package.Net"),
        "5:15: module1: cannot import no_such_package from {cwd} (ModuleNotFoundError: No module named 'no_such_package')",
    ),
    (
        "own module attribute",
        swap("- max_pool: {kernel: 2}", "- module: torch.nn.Dropuot"),
        "5:15: module1: torch.nn has no 'Dropuot'. Did you mean 'Dropout'?",
    ),
    (
        "own module arguments",
        swap("- max_pool: {kernel: 2}", "- module: {name: torch.nn.Linear, arguments: {a: 1}}"),
        "5:15: module1: torch.nn.Linear(a=1) raised TypeError: Linear.__init__() got an unexpected keyword argument 'a'",
    ),
    (
        "layers and module",
        swap("  cost:", "  module: torch.nn.Flatten\n  cost:"),
        "3:3: model has both layers and module: expected one of `layers:`, `module:`, `autoencoder:`",
    ),
    (
        "neither",
        "dataset: mnist\nmodel: {cost: cross_entropy}\noptimizer: {name: sgd, lr: 0.1}\nepochs: 1\nbatch_size: 5\n",
        "2:8: model has no layers: expected one of `layers:`, `module:`, `autoencoder:`",
    ),
]
