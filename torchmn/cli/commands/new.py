"""`torchmn new`: writes an example experiment file, or batch scripts for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import torchmn
from torchmn.cli.parser import Parser
from torchmn.errors import nearest

CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
CIFAR10_FOLDER = "cifar-10-batches-py"

SLURM = "slurm"
BATCH_SCRIPTS = ("slurm-mpi.sbatch", "slurm-torchrun.sbatch")

STARTERS = Path(torchmn.__file__).with_name("experiment") / "starters"


def starters() -> dict[str, str]:
    """Returns the name of each example, with the description in its first line."""
    paths = sorted(STARTERS.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in paths}


def main(arguments: Sequence[str]) -> int:
    """Writes the file unless it exists; returns the exit status."""
    known, parser = starters(), command_parser()
    options = parser.parse(arguments)
    if options.name is None:
        parser.print_help()
        return 0
    if options.name == SLURM:
        if options.file is not None:
            parser.error(f"{SLURM} takes no FILE: it writes {' and '.join(BATCH_SCRIPTS)}.")
        return _write_batch_scripts(parser)
    if options.name not in known:
        alike = [name for name in known if name.startswith(options.name)]  # `torchmn new mnist`
        hint = f"Did you mean one of {', '.join(alike)}?" if len(alike) > 1 else nearest(options.name, [*known, SLURM])
        parser.error(f"there is no example {options.name!r}. {hint}")
    path = Path(options.file or f"{options.name}.yaml")
    if path.exists():
        parser.error(f"{path} already exists. Choose another name: torchmn new {options.name} FILE")
    _copy(parser, f"{options.name}.yaml", path)
    print(f"wrote {path}\n")
    command = f"torchmn train {shlex.quote(str(path))}"
    if "{name: cifar10}" in path.read_text(encoding="utf-8"):
        print(f"# CIFAR-10, 170 MB:\n{_download_commands()}\n")
        command += f" --data {CIFAR10_FOLDER}"
    print(f"# Train on one rank, or on two:\n{command}\n{command} -n 2")
    return 0


def _copy(parser: Parser, starter: str, path: Path) -> None:
    try:
        path.write_text((STARTERS / starter).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {path} ({error.strerror}).")


def _write_batch_scripts(parser: Parser) -> int:
    for name in BATCH_SCRIPTS:
        if Path(name).exists():
            parser.error(f"{name} already exists. Rename or remove it.")
    for name in BATCH_SCRIPTS:
        _copy(parser, name, Path(name))
    print(f"wrote {' and '.join(BATCH_SCRIPTS)}\n")
    print("# Adapt the #SBATCH lines. Over MPI (`torchmn doctor` in an allocation checks it), or with torchrun:")
    print("\n".join(f"sbatch {name} mnist-cnn.yaml --datapar" for name in BATCH_SCRIPTS))
    return 0


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    known = {**starters(), SLURM: f"Batch scripts: {' and '.join(BATCH_SCRIPTS)}."}
    width = max(map(len, known), default=0)
    listed = "".join(f"  {name:{width}}  {about}\n" for name, about in known.items())
    parser = Parser(
        "torchmn new", "Writes an example experiment file with comments, or scripts for Slurm.", f"names:\n{listed}"
    )
    parser.usage = "torchmn new [NAME] [FILE]"
    parser.add_argument("name", metavar="NAME", nargs="?", help="an example from the list below")
    parser.add_argument("file", metavar="FILE", nargs="?", help="file to write; default: NAME.yaml")
    return parser


def _download_commands() -> str:
    """Returns shell commands that download CIFAR-10, verify it, and unpack it to CIFAR10_FOLDER."""
    archive = CIFAR10.rpartition("/")[2]
    return (
        f"curl -O {CIFAR10}\n"
        f"SUM={CIFAR10_SHA256}\n"  # a line with the file's name would not fit a terminal
        f'echo "$SUM  {archive}" | sha256sum --check &&\ntar xzf {archive}'
    )
