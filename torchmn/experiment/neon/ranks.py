"""How ranks share the work in a neon file, and how many samples a step of all of them has."""

from __future__ import annotations

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.said import Said, plain
from torchmn.modes import mode_of as mode_named

MODES = ("halopar", "vecpar", "datapar", "halodatapar")
"""Those of neon."""


def mode_of(experiment: Said, dataset: Said, model: Said, notes: list[str]) -> Said | None:
    """The mode that the data set, the model or the experiment names; they must not contradict each other.

    Args:
        experiment: may have dist_flag and dist_mode.
        dataset: as well.
        model: as well.
        notes: gets a line where a mode is named, and switched off.
    """
    parts = (dataset, model, experiment)
    modes = [(part, found) for part in parts if (found := part.get("dist_mode")) is not None]
    flags = [(part, found) for part in parts if (found := part.get("dist_flag")) is not None]
    for part, found in modes:
        part.word("dist_mode")
        if found.value not in MODES:
            raise ExperimentError(
                f"{found.where}: the dist_mode {found.value!r} is not supported. {nearest(found.value, MODES)}"
            )
    for _, found in flags:
        if not isinstance(found.value, bool):
            raise ExperimentError(f"{found.where}: expected dist_flag to be True or False, got {plain(found)!r}")
    for key, found in (("dist_mode", modes), ("dist_flag", flags)):
        others = [(part, value) for part, value in found if value.value != found[0][1].value]
        if others:
            part, value = others[0]
            first, named = found[0]
            raise ExperimentError(
                f"{value.where}: {key} is {value.value} in {part.kind}, and {named.value} in {first.kind}: they must "
                "be the same"
            )
    if not modes:
        if flags and flags[0][1].value:
            where = flags[0][1].where
            raise ExperimentError(f"{where}: dist_flag: True needs a dist_mode in the data set: {', '.join(MODES)}")
        return None
    mode = modes[0][1]
    if not flags or not flags[0][1].value:
        why = "dist_flag is False" if flags else "there is no dist_flag: True"
        notes.append(f"{mode.where}: dist_mode has no meaning today: {why}, and neon runs on one rank")
        return None
    return Said(mode_named(mode.value).name, mode.where)


def batch_size_of(dataset: Said, own: Said, mode: Said | None, notes: list[str]) -> Said:
    """The batch of all ranks: under datapar that of the data set, where the model says the share of one rank."""
    whole = dataset.get("batch_size")
    if mode is None or mode.value != "datapar":
        if whole is not None:
            notes.append(f"{whole.where}: batch_size of a data set has no meaning today: neon reads it in datapar only")
        return own
    if whole is None:
        raise ExperimentError(
            f"{own.where}: batch_size {plain(own)} is that of one rank in datapar: the data set needs a batch_size, "
            "that of all ranks together"
        )
    if plain(whole) != plain(own):
        notes.append(
            f"{own.where}: batch_size {plain(own)} was that of one rank: {plain(whole)}, of all ranks together, is used"
        )
    return whole
