"""`torchmn schema`: the JSON schema of experiment files."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torchmn.cli.parser import Parser

EXPLANATION = """\
An editor with a YAML language server then completes and checks experiment files:

    torchmn schema > torchmn.schema.json

and as the first line of a file:

    # yaml-language-server: $schema=torchmn.schema.json
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the schema."""
    parser = Parser("torchmn schema", "Prints the JSON schema of experiment files.", EXPLANATION)
    parser.parse(arguments)
    from torchmn.experiment.vocabulary.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
