"""`torchmn convert`: a neon experiment in our format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchmn.cli.parser import Parser
from torchmn.errors import ExperimentError

EXPLANATION = """\
Without NEW the experiment is printed. What has no meaning today is named on the standard error, with its line; what
is not supported is an error. Nothing that the old file names is imported.

`torchmn train OLD` reads such files directly.
"""


def main(arguments: Sequence[str]) -> int:
    """Writes the experiment."""
    parser = Parser("torchmn convert", "Writes the neon experiment in OLD in TorchMN's format.", EXPLANATION)
    parser.usage = "torchmn convert OLD [NEW]"
    parser.add_argument("old", metavar="OLD", help="the experiment file of neon 0.x")
    parser.add_argument("new", metavar="NEW", nargs="?", help="the file to write")
    options = parser.parse(arguments)
    try:
        text = _converted(options.old)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return 2
    if options.new is None:
        print(text, end="")
        return 0
    if Path(options.new).exists():
        parser.error(f"{options.new} is there already. Name another file.")
    try:
        Path(options.new).write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"{options.new} can not be written ({error.strerror}).")
    print(f"wrote {options.new}")
    return 0


def _converted(old: str) -> str:
    from torchmn.experiment.file.document import read_text
    from torchmn.experiment.file.writing import as_yaml
    from torchmn.experiment.vocabulary.load import check, parse

    parsed = parse(old, read_text(Path(old)))
    check(parsed.document, run_imports=False)
    text = as_yaml(parsed.document.values)
    for note in parsed.notes:
        print(note, file=sys.stderr)
    return f"# From {Path(old).name}.\n{text}"
