"""The parallel modes: how the ranks of a job share the work on a model. Used by the library and the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A parallel mode.

    Attributes:
        name: `datapar`, `modelpar`, `halopar`, `halodatapar` or `hybrid`.
        title: what the field calls it, for reports.
        divides: what is divided among the ranks: "samples", "vectors" or "images". With two entries, the first is
            divided among groups of ranks and the second among the ranks of a group.
        description: one sentence for help texts and reports.
        flags: the command line options that together select the mode.
        short: the short command line option, as in neon's `bin/neon`; empty if there is none.
    """

    name: str
    title: str
    divides: tuple[str, ...]
    description: str
    flags: tuple[str, ...]
    short: str = ""

    @property
    def flag(self) -> str:
        """The command line options that select the mode, as one string."""
        return " ".join(f"--{flag}" for flag in self.flags)

    @property
    def cuts_images(self) -> bool:
        """Whether images are cut into tiles."""
        return "images" in self.divides


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "datapar",
            "data parallel",
            ("samples",),
            "ranks divide the samples of each batch (data parallel)",
            ("datapar",),
            "-p",
        ),
        Mode(
            "modelpar",
            "tensor parallel",
            ("vectors",),
            "ranks divide the vectors of linear layers, the maps of convolutions, and their weights (tensor parallel)",
            ("modelpar",),
            "-m",
        ),
        Mode(
            "halopar",
            "spatial parallel",
            ("images",),
            "ranks divide each image into tiles and exchange halos (spatial parallel)",
            ("halopar",),
        ),
        Mode(
            "halodatapar",
            "data and spatial parallel",
            ("samples", "images"),
            "groups of ranks divide the samples, the ranks of a group divide each image",
            ("halodatapar",),
        ),
        Mode(
            "hybrid",
            "data and tensor parallel",
            ("samples", "vectors"),
            "groups of ranks divide the samples, the ranks of a group divide the vectors",
            ("datapar", "modelpar"),
        ),
    )
}
BASIC_MODES = {name: mode for name, mode in MODES.items() if mode.flags == (name,)}
"""Modes with a single command line option, which `parallelize` accepts; its grid may add an axis `data` to them."""
ALIASES = {"vecpar": "modelpar"}
NAMES = tuple(name for mode in MODES for name in (mode, *(alias for alias in ALIASES if ALIASES[alias] == mode)))
"""All valid names of modes, aliases included."""


def mode_of(name: str) -> Mode:
    """Returns the mode with this name or alias, one of `NAMES`."""
    return MODES[ALIASES.get(name, name)]
