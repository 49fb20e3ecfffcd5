"""The modes in which ranks share the work on a model: the one list of them, for libraries and command lines alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A way to share the work.

    divides: what ranks divide, of samples, vectors and images; with two of them, groups of ranks the first.
    description: the same in a sentence, for help and reports.
    flags: which command line options name it.
    short: another name of its option, as bin/neon had it.
    """

    name: str
    divides: tuple[str, ...]
    description: str
    flags: tuple[str, ...]
    short: str = ""

    @property
    def flag(self) -> str:
        """How a command line says it."""
        return " ".join(f"--{flag}" for flag in self.flags)

    @property
    def cuts_images(self) -> bool:
        return "images" in self.divides


MODES = {
    mode.name: mode
    for mode in (
        Mode("datapar", ("samples",), "ranks divide the samples of each batch", ("datapar",), "-p"),
        Mode(
            "modelpar",
            ("vectors",),
            "ranks divide the vectors of linear layers and the maps of convolutions, and so the weights",
            ("modelpar",),
            "-m",
        ),
        Mode("halopar", ("images",), "ranks divide the images, and exchange their edges", ("halopar",)),
        Mode(
            "halodatapar",
            ("samples", "images"),
            "groups of ranks divide the samples, the ranks of a group the images",
            ("halodatapar",),
        ),
        Mode(
            "hybrid",
            ("samples", "vectors"),
            "groups of ranks divide the samples, the ranks of a group the vectors",
            ("datapar", "modelpar"),
        ),
    )
}
BASIC_MODES = {name: mode for name, mode in MODES.items() if mode.flags == (name,)}
"""Those with an option: `parallelize` takes them, and finds a hybrid in the axes of its grid."""
ALIASES = {"vecpar": "modelpar"}
NAMES = tuple(name for mode in MODES for name in (mode, *(alias for alias in ALIASES if ALIASES[alias] == mode)))
"""All names that a user may say."""


def mode_of(name: str) -> Mode:
    """The mode with one of NAMES."""
    return MODES[ALIASES.get(name, name)]
