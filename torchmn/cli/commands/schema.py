"""`torchmn schema`: prints the JSON schema of experiment files."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torchmn.cli.parser import Parser

EXPLANATION = """\
With it, an editor with a YAML language server completes and checks experiment files. Write it to a file:

    torchmn schema > torchmn.schema.json

and refer to it in the first line of an experiment:

    # yaml-language-server: $schema=torchmn.schema.json
"""


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    return Parser("torchmn schema", "Prints the JSON schema of experiment files.", EXPLANATION)


def main(arguments: Sequence[str]) -> int:
    """Prints the schema; returns the exit status."""
    command_parser().parse(arguments)
    from torchmn.experiment.vocabulary.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
