"""Loading: the newest save that every rank can read, after all of it was checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmn.communicators.agreement import by_rank
from torchmn.training.checkpoint import entries, random_states
from torchmn.training.checkpoint.directory import Identity, Site, Snapshot
from torchmn.training.checkpoint.manifest import CheckpointError, DamagedCheckpoint, Place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What `load_newest` found."""

    step: int
    extra: Any


@dataclass
class Choice:
    """What this rank takes from a snapshot: from which saved rank each entry, which seeds, and what it leaves."""

    sources: dict[str, int] = field(default_factory=dict)
    reseeded: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def load_newest(site: Site, step: int | None, from_rank: int | None, objects: Mapping[str, Any]) -> Loaded | None:
    """Load the newest checkpoint (of this step) that all ranks can read into `objects`."""
    comm = site.comm
    whole: dict[Identity, Snapshot] = {}

    def look() -> tuple[list[Identity], dict[Place, str]]:
        found, broken = site.library.look()
        whole.update(found)
        return list(found), broken

    told = comm.attempt("maybe_load", look, raises=CheckpointError)
    places = {place for found, broken in told for place in (*(place for place, _ in found), *broken)}
    for place in sorted(places, reverse=True):
        if step is not None and place.step != step:
            continue
        identities = [next((one for one in found if one[0] == place), None) for found, _ in told]
        problems = {
            rank: told[rank][1].get(place, "it is not on this disk")
            for rank, identity in enumerate(identities)
            if identity is None
        }
        if not problems and len(set(identities)) > 1:
            problems = {rank: f"it is another save, {identity}" for rank, identity in enumerate(identities)}
        if not problems:
            result = _try(site, whole[identities[comm.rank]], from_rank, objects, problems)  # type: ignore[index]
            if result is not None:
                return result
        if comm.rank == 0:
            reasons = "\n  ".join(by_rank(f"of {comm.size}", problems))
            what = f"checkpoint {site.library.name!r} of step {place.step} (save {place.number})"
            _log.warning("torchmn: %s is skipped:\n  %s", what, reasons)
    if step is not None:
        steps = sorted({place.step for place in places})
        raise CheckpointError(f"maybe_load: no checkpoint of step {step} that all ranks can read; seen: {steps}")
    return None


def _try(
    site: Site, snapshot: Snapshot, from_rank: int | None, objects: Mapping[str, Any], problems: dict[int, str]
) -> Loaded | None:
    """Load a snapshot, or fill in the `problems` of the ranks that can not read it."""
    comm = site.comm
    choice = Choice()
    trees: dict[str, Any] = {}
    states: dict[str, Any] = {}

    def read() -> str | None:
        nonlocal choice
        choice = choose(snapshot, comm.rank, comm.size, from_rank, objects, random_states.names(comm.device))
        try:
            found = snapshot.read(choice.sources)
        except DamagedCheckpoint as problem:
            return str(problem)
        trees.update(found[0])
        states.update(found[1])
        return None

    def check() -> None:
        for name in sorted(objects.keys() & states.keys()):
            problem = entries.fit_problem(name, objects[name], states[name], trees[name])
            if problem:
                raise CheckpointError(problem)

    def load() -> None:
        for name in sorted(objects.keys() & states.keys()):
            try:
                entries.load(objects[name], states[name])
            except Exception as error:
                raise CheckpointError(f"{name}: load_state_dict: {type(error).__name__}: {error}") from error
        # Last: loading may draw random numbers.
        for name in random_states.names(comm.device):
            if name in states:
                random_states.restore(name, states[name], comm.device)
            elif name in choice.reseeded:
                random_states.reseed(name, snapshot.seed(name, comm.rank, comm.size), comm.device)

    answers = comm.attempt("maybe_load", read, raises=CheckpointError)
    problems.update({rank: text for rank, text in enumerate(answers) if text})
    if problems:
        site.spoiled.add(snapshot.identity)
        return None
    comm.attempt("maybe_load", check, raises=CheckpointError)
    comm.attempt("maybe_load", load, raises=CheckpointError)
    if comm.rank == 0:
        _tell_what_was_not_loaded(snapshot, choice, objects)
    return Loaded(snapshot.manifest.step, states[entries.EXTRA])


def choose(
    snapshot: Snapshot,
    rank: int,
    size: int,
    from_rank: int | None,
    objects: Mapping[str, Any],
    generators: list[str],
) -> Choice:
    """What `rank` of `size` takes from a snapshot, by the rules of `maybe_load`; raises `CheckpointError`."""
    saved = snapshot.manifest
    unknown = entries.unknown_problem(objects, saved.entries)
    if unknown:
        raise CheckpointError(unknown)
    if from_rank is not None and from_rank >= saved.size:
        raise CheckpointError(
            f"expected from_rank in 0..{saved.size - 1} (saved on {saved.size} ranks), got {from_rank}"
        )
    wanted = [*sorted(objects), entries.EXTRA]
    if saved.size == size:
        wanted += [name for name in generators if snapshot.has(name, rank)]
        return Choice(dict.fromkeys(wanted, rank))
    wanted += [name for name in generators if name in saved.entries]
    differing = snapshot.differing(wanted)
    # The others are the same whichever rank is asked; this disk holds those of its own ranks.
    choice = Choice({name: saved.ranks[0] for name in wanted if name not in differing})
    for name in differing:
        if name in generators:
            choice.reseeded.append(name)
        elif from_rank is not None:
            choice.sources[name] = from_rank
        elif name == entries.ITERATOR:
            choice.left.append(name)
        else:
            raise CheckpointError(
                f"{snapshot.first_difference(name)!r} was not the same on the {saved.size} ranks of the checkpoint, "
                f"and now there are {size}: run on {saved.size} ranks, or give all ranks the values of one of the "
                "saved ranks with maybe_load(from_rank=0, ...)"
            )
    return choice


def _tell_what_was_not_loaded(snapshot: Snapshot, choice: Choice, objects: Mapping[str, Any]) -> None:
    saved = snapshot.manifest
    others = [name for name in saved.entries if entries.is_user_entry(name) and name not in objects]
    what = f"torchmn: checkpoint {saved.name!r} of step {saved.step}"
    if others:
        _log.warning("%s: not loaded, because not asked for: %s", what, ", ".join(others))
    if choice.left:
        _log.warning(
            "%s: the position of the iterator is not restored: it was saved on %d ranks, which divided the data "
            "differently; the iterator stays as it is",
            what,
            saved.size,
        )
