"""`torchmn convert`: writes a neon experiment file in TorchMN's format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchmn.cli.help_layout import fitted
from torchmn.cli.parser import Parser
from torchmn.errors import ExperimentError

EXPLANATION = """\
Without NEW the experiment is printed. Keys that have no effect in TorchMN are listed on standard error with their
line; unsupported ones are an error. Nothing that OLD names is imported.

`torchmn train OLD` reads such files directly.
"""


def main(arguments: Sequence[str]) -> int:
    """Converts the file; returns the exit status."""
    parser = command_parser()
    options = parser.parse(arguments)
    try:
        text = _converted(options.old)
    except ExperimentError as error:
        print(fitted(str(error), sys.stderr), file=sys.stderr)
        return 2
    if options.new is None:
        print(text, end="")
        return 0
    if Path(options.new).exists():
        parser.error(f"{options.new} already exists. Choose another name.")
    try:
        Path(options.new).write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {options.new} ({error.strerror}).")
    print(f"wrote {options.new}")
    return 0


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn convert", "Converts the neon experiment file OLD to TorchMN's format.", EXPLANATION)
    parser.usage = "torchmn convert OLD [NEW]"
    parser.add_argument("old", metavar="OLD", help="experiment file of neon 0.x")
    parser.add_argument("new", metavar="NEW", nargs="?", help="file to write; it must not exist")
    return parser


def _converted(old: str) -> str:
    from torchmn.experiment.file.document import read_text
    from torchmn.experiment.file.writing import as_yaml
    from torchmn.experiment.vocabulary.load import check, parse

    parsed = parse(old, read_text(Path(old)))
    check(parsed.document, run_imports=False)
    text = as_yaml(parsed.document.values)
    for note in parsed.notes:
        print(fitted(note, sys.stderr), file=sys.stderr)
    return f"# From {Path(old).name}.\n{text}"
