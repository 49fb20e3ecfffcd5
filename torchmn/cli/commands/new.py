"""`torchmn new`: an experiment file to start from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from torchmn.cli.parser import Parser
from torchmn.errors import nearest

STARTERS = Path(__file__).parents[1] / "experiment" / "starters"


def starters() -> dict[str, str]:
    """The name of each starter, and its first line, which says what it is."""
    paths = sorted(STARTERS.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in paths}


def main(arguments: Sequence[str]) -> int:
    """Writes the file, unless there is one of its name."""
    known = starters()
    width = max(map(len, known), default=0)
    listed = "".join(f"  {name:{width}}  {about}\n" for name, about in known.items())
    parser = Parser("torchmn new", "Writes a commented experiment file to start from.", f"names:\n{listed}")
    parser.usage = "torchmn new NAME [FILE]"
    parser.add_argument("name", metavar="NAME", help="which one, from the list below")
    parser.add_argument("file", metavar="FILE", nargs="?", help="where to write it; by default NAME.yaml")
    options = parser.parse(arguments)
    if options.name not in known:
        alike = [name for name in known if name.startswith(options.name)]  # `torchmn new mnist`
        offer = f"There are {', '.join(alike)}." if len(alike) > 1 else nearest(options.name, known)
        parser.error(f"there is no starter {options.name!r}. {offer}")
    path = Path(options.file or f"{options.name}.yaml")
    if path.exists():
        parser.error(f"{path} is there already. Name another file: torchmn new {options.name} FILE")
    try:
        path.write_text((STARTERS / f"{options.name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        parser.error(f"{path} can not be written ({error.strerror}).")
    command = f"torchmn train {shlex.quote(str(path))}"
    print(f"wrote {path}\nto train it:    {command}\non two ranks:   {command} -n 2")
    return 0
