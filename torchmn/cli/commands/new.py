"""`torchmn new`: writes an example experiment file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import torchmn
from torchmn.cli.parser import Parser
from torchmn.errors import nearest

STARTERS = Path(torchmn.__file__).with_name("experiment") / "starters"


def starters() -> dict[str, str]:
    """Returns the name of each example, with the description in its first line."""
    paths = sorted(STARTERS.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in paths}


def main(arguments: Sequence[str]) -> int:
    """Writes the file unless it exists; returns the exit status."""
    known = starters()
    width = max(map(len, known), default=0)
    listed = "".join(f"  {name:{width}}  {about}\n" for name, about in known.items())
    parser = Parser("torchmn new", "Writes an example experiment file with comments.", f"names:\n{listed}")
    parser.usage = "torchmn new NAME [FILE]"
    parser.add_argument("name", metavar="NAME", help="an example from the list below")
    parser.add_argument("file", metavar="FILE", nargs="?", help="file to write; default: NAME.yaml")
    options = parser.parse(arguments)
    if options.name not in known:
        alike = [name for name in known if name.startswith(options.name)]  # `torchmn new mnist`
        hint = f"Did you mean one of {', '.join(alike)}?" if len(alike) > 1 else nearest(options.name, known)
        parser.error(f"there is no example {options.name!r}. {hint}")
    path = Path(options.file or f"{options.name}.yaml")
    if path.exists():
        parser.error(f"{path} already exists. Choose another name: torchmn new {options.name} FILE")
    try:
        path.write_text((STARTERS / f"{options.name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {path} ({error.strerror}).")
    command = f"torchmn train {shlex.quote(str(path))}"
    print(f"wrote {path}\ntrain:          {command}\non two ranks:   {command} -n 2")
    return 0
