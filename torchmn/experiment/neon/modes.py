"""The mode of a neon experiment, and the batch size that it implies."""

from __future__ import annotations

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, plain
from torchmn.modes import mode_of as mode_named

MODES_OF_MODELS = {"GBDist": "halopar", "ConvnetDist": "halopar", "MLPDist": "vecpar"}
"""The modes of models before neon had `dist_mode`."""
NEON_MODES = ("halopar", "vecpar", "modelpar", "datapar", "halodatapar")
NUMBERED = {1: "vecpar"}
"""The number that files of 2014 have in place of a mode, before modes had names: `dist_mode: 1, # FC split`."""


def mode_of(experiment: TaggedValue, dataset: TaggedValue, model: TaggedValue, notes: list[str]) -> TaggedValue | None:
    """Returns the mode of the experiment, or None.

    Each argument may have dist_mode and dist_flag, which must be the same in all of them.

    Args:
        experiment: the neon experiment.
        dataset: its data set.
        model: its model.
        notes: receives a line if a mode is given, but switched off.
    """
    sections = (dataset, model, experiment)
    modes = [(section, found) for section in sections if (found := _dist_mode(section)) is not None]
    flags = [(section, found) for section in sections if (found := section.get("dist_flag")) is not None]
    for _, found in flags:
        if not isinstance(found.value, bool):
            raise ExperimentError(f"{found.where}: expected dist_flag to be True or False, got {plain(found)!r}")
    for key, found in (("dist_mode", modes), ("dist_flag", flags)):
        different = [(section, value) for section, value in found if _meaning(value) != _meaning(found[0][1])]
        if different:
            section, value = different[0]
            first_section, first = found[0]
            raise ExperimentError(
                f"{value.where}: {key} is {value.value} in {section.kind}, and {first.value} in {first_section.kind}: "
                "they must be the same"
            )
    if not modes:
        if not flags or not flags[0][1].value:
            return None
        where = flags[0][1].where
        if model.kind not in MODES_OF_MODELS:
            raise ExperimentError(
                f"{where}: dist_flag: True needs a dist_mode in the data set: {', '.join(NEON_MODES)}"
            )
        mode = MODES_OF_MODELS[model.kind]
        notes.append(f"{where}: dist_flag: True without dist_mode: {model.kind} is trained in {mode}")
        return TaggedValue(mode_named(mode).name, where)
    mode = modes[0][1]
    if not flags or not flags[0][1].value:
        reason = "dist_flag is False" if flags else "there is no dist_flag: True"
        notes.append(f"{mode.where}: dist_mode has no effect: {reason}, and neon runs on one rank")
        return None
    return TaggedValue(mode_named(mode.value).name, mode.where)


def batch_size_of(dataset: TaggedValue, local: TaggedValue, mode: TaggedValue | None, notes: list[str]) -> TaggedValue:
    """Returns the batch size over all ranks.

    Args:
        dataset: the data set, whose batch_size is that over all ranks under datapar.
        local: batch_size of the model, under datapar that of one rank.
        mode: of the experiment.
        notes: receives a line if a batch_size has no effect.
    """
    total = dataset.get("batch_size")
    if mode is None or mode.value != "datapar":
        if total is not None:
            notes.append(f"{total.where}: batch_size of a data set has no effect: neon reads it in datapar only")
        return local
    if total is None:
        raise ExperimentError(
            f"{local.where}: batch_size {plain(local)} is that of one rank in datapar: the data set needs a "
            "batch_size, that of all ranks together"
        )
    if plain(total) != plain(local):
        notes.append(
            f"{local.where}: batch_size {plain(local)} was that of one rank: {plain(total)}, of all ranks together, is "
            "used"
        )
    return total


def _dist_mode(section: TaggedValue) -> TaggedValue | None:
    """Returns the mode that a section names, or None; raises an ExperimentError if there is no such mode."""
    found = section.get("dist_mode")
    if found is None:
        return None
    if type(found.value) is int and found.value in NUMBERED:
        return TaggedValue(NUMBERED[found.value], found.where)
    section.string("dist_mode")
    if found.value not in NEON_MODES:
        raise ExperimentError(
            f"{found.where}: the dist_mode {found.value!r} is not supported. {nearest(found.value, NEON_MODES)}"
        )
    return found


def _meaning(mode_or_flag: TaggedValue) -> str | bool:
    """Returns a flag, or the name of a mode: `modelpar` and `vecpar` are the same one."""
    value = mode_or_flag.value
    return value if isinstance(value, bool) else mode_named(value).name
