"""Invalid experiment files with their error messages: invalid or unsupported YAML."""

from __future__ import annotations

from tests.experiment.files import swap

__all__ = ["BROKEN"]

# What is wrong, the file, and the message after the file's name; {cwd} is the current directory.
BROKEN = [
    ("empty file", "", "1:1: the file is empty: expected at least dataset, model, optimizer, epochs and batch_size"),
    (
        "only a comment",
        "# nothing\n",
        "1:1: the file is empty: expected at least dataset, model, optimizer, epochs and batch_size",
    ),
    ("a list", "- conv\n- relu\n", "1:1: expected keys with values, such as `epochs: 5`, got a list"),
    ("a word", "mnist\n", "1:1: expected keys with values, such as `epochs: 5`, got 'mnist'"),
    (
        "tab",
        "dataset: mnist\n\tmodel: x\n",
        "2:1: invalid YAML: while scanning for the next token, found character '\\t' that cannot start any token",
    ),
    (
        "unclosed flow",
        "dataset: {name: mnist\nmodel: 3\n",
        "2:6: invalid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'",
    ),
    (
        "bad indent",
        "model:\n    layers: []\n  cost: cross_entropy\n",
        "3:3: invalid YAML: while parsing a block mapping, expected <block end>, but found '<block mapping start>'",
    ),
    (
        "two documents",
        "epochs: 1\n---\nepochs: 2\n",
        "2:1: invalid YAML: expected a single document in the stream, but found another document",
    ),
    ("undefined alias", "epochs: *many\n", "1:9: invalid YAML: found undefined alias 'many'"),
    ("recursive alias", "model: &m\n  layers: *m\n", "1:8: an alias refers to a node that contains it"),
    ("key twice", "epochs: 1\nepochs: 2\n", "2:1: duplicate key 'epochs' (first at 1:1)"),
    (
        "python tag",
        "epochs: !!python/object/apply:os.system [echo]\n",
        "1:9: expected no tag, got '!!python/object/apply:os.system': experiment files contain plain values only",
    ),
    (
        "own tag",
        swap("{units: 10}", "!mine {units: 10}"),
        "6:15: expected no tag, got '!mine': experiment files contain plain values only",
    ),
    ("key is list", "? [a, b]\n: 1\n", "1:3: expected a name as the key, got a list"),
    ("merge of number", "model:\n  <<: 3\n", "2:7: expected `<<` to merge mappings, got '3'"),
    ("control char", "epochs: \x01\n", "1:9: invalid YAML: special characters are not allowed"),
]
