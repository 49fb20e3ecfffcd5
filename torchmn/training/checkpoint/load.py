"""Loads the newest checkpoint that all ranks can read, after checking all of it on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmn.communicators.agreement import lines_by_rank
from torchmn.training.checkpoint import entries, random_states
from torchmn.training.checkpoint.directory import CheckpointStore, Identity, Snapshot
from torchmn.training.checkpoint.manifest import CheckpointError, DamagedCheckpoint, SaveId

_logger = logging.getLogger("torchmn.checkpoint")


@dataclass(frozen=True)
class Loaded:
    """Step and `extra` of the checkpoint that was loaded."""

    step: int
    extra: Any


@dataclass
class LoadPlan:
    """What this rank loads from a snapshot.

    Attributes:
        sources: the saved rank from which each entry is taken.
        reseeded: random generators that get a new seed.
        unchanged: entries that are not loaded.
    """

    sources: dict[str, int] = field(default_factory=dict)
    reseeded: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


def load_newest(
    store: CheckpointStore, step: int | None, from_rank: int | None, objects: Mapping[str, Any]
) -> Loaded | None:
    """Loads the newest checkpoint (of `step`, unless None) that all ranks can read into `objects`."""
    comm = store.comm
    saves = {
        save for found in comm.attempt("maybe_load", store.directory.saves, raises=CheckpointError) for save in found
    }
    for save in sorted(saves, reverse=True):
        if step is not None and save.step != step:
            continue
        problems: dict[int, str] = {}
        snapshot = _open(store, save, problems)
        if snapshot is not None:
            result = _load_snapshot(store, snapshot, from_rank, objects, problems)
            if result is not None:
                return result
        if comm.rank == 0:
            reasons = "\n  ".join(lines_by_rank(f"of {comm.size}", problems))
            title = f"checkpoint {store.directory.name!r} of step {save.step} (save {save.number})"
            _logger.warning("torchmn: %s is skipped:\n  %s", title, reasons)
    if step is not None:
        steps = sorted({save.step for save in saves})
        raise CheckpointError(f"maybe_load: no checkpoint of step {step} that all ranks can read; found: {steps}")
    return None


def _open(store: CheckpointStore, save: SaveId, problems: dict[int, str]) -> Snapshot | None:
    """Returns the checkpoint of a save; None on all ranks if one cannot open it, and adds the `problems` of ranks."""
    snapshot: Snapshot | None = None

    def read_manifest() -> tuple[Identity | None, str]:
        nonlocal snapshot
        if save not in store.directory.saves():
            return None, "it is not on this disk"
        try:
            snapshot = store.directory.open(save)
        except DamagedCheckpoint as problem:
            return None, str(problem)
        return snapshot.identity, ""

    ranks = store.comm.attempt("maybe_load", read_manifest, raises=CheckpointError)
    problems.update({rank: problem for rank, (_, problem) in enumerate(ranks) if problem})
    if not problems and len({identity for identity, _ in ranks}) > 1:
        problems.update({rank: f"it is another save, {identity}" for rank, (identity, _) in enumerate(ranks)})
    return None if problems else snapshot


def _load_snapshot(
    store: CheckpointStore,
    snapshot: Snapshot,
    from_rank: int | None,
    objects: Mapping[str, Any],
    problems: dict[int, str],
) -> Loaded | None:
    """Loads a snapshot on all ranks, or on none: then adds the `problems` of the ranks that cannot read it."""
    comm = store.comm
    plan = LoadPlan()
    trees: dict[str, Any] = {}
    states: dict[str, Any] = {}

    def read() -> str | None:
        nonlocal plan
        plan = plan_load(snapshot, comm.rank, comm.size, from_rank, objects, random_states.names(comm.device))
        try:
            found = snapshot.read(plan.sources, {name: entries.copied_keys(obj) for name, obj in objects.items()})
        except DamagedCheckpoint as problem:
            return str(problem)
        trees.update(found[0])
        states.update(found[1])
        return None

    def load() -> None:
        _load_objects(objects, states)
        # After the objects, because loading them may draw random numbers.
        for name in random_states.names(comm.device):
            if name in states:
                random_states.restore(name, states[name], comm.device)
            elif name in plan.reseeded:
                random_states.reseed(name, snapshot.seed(name, comm.rank, comm.size), comm.device)

    read_problems = comm.attempt("maybe_load", read, raises=CheckpointError)
    problems.update({rank: problem for rank, problem in enumerate(read_problems) if problem})
    if problems:
        store.unreadable.add(snapshot.identity)
        return None
    comm.attempt("maybe_load", lambda: _check_objects(objects, states, trees), raises=CheckpointError)
    comm.attempt("maybe_load", load, raises=CheckpointError)
    if comm.rank == 0:
        _log_unloaded_entries(snapshot, plan, objects)
    return Loaded(snapshot.manifest.step, states[entries.EXTRA])


def _check_objects(objects: Mapping[str, Any], states: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
    for name in sorted(objects.keys() & states.keys()):
        problem = entries.fit_problem(name, objects[name], states[name], trees[name])
        if problem:
            raise CheckpointError(problem)


def _load_objects(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name in sorted(objects.keys() & states.keys()):
        try:
            entries.load(objects[name], states[name])
        except Exception as error:  # user code may raise anything
            raise CheckpointError(f"{name}: load_state_dict: {type(error).__name__}: {error}") from error


def plan_load(
    snapshot: Snapshot,
    rank: int,
    size: int,
    from_rank: int | None,
    objects: Mapping[str, Any],
    generators: list[str],
) -> LoadPlan:
    """Returns what `rank` of `size` loads from a snapshot, by the rules of `maybe_load`; raises `CheckpointError`."""
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
        return LoadPlan(dict.fromkeys(wanted, rank))
    wanted += [name for name in generators if name in saved.entries]
    differing = snapshot.differing(wanted)
    # The other entries are equal on all ranks; this disk has those of `saved.ranks`.
    plan = LoadPlan({name: saved.ranks[0] for name in wanted if name not in differing})
    for name in differing:
        if name in generators:
            plan.reseeded.append(name)
        elif from_rank is not None:
            plan.sources[name] = from_rank
        elif name == entries.ITERATOR:
            plan.unchanged.append(name)
        else:
            raise CheckpointError(
                f"{snapshot.first_difference(name)!r} was not the same on the {saved.size} ranks of the checkpoint, "
                f"and now there are {size}: run on {saved.size} ranks, or load the values of one saved rank on "
                "all ranks with maybe_load(from_rank=0, ...)"
            )
    return plan


def _log_unloaded_entries(snapshot: Snapshot, plan: LoadPlan, objects: Mapping[str, Any]) -> None:
    saved = snapshot.manifest
    unrequested = [name for name in saved.entries if entries.is_user_entry(name) and name not in objects]
    title = f"torchmn: checkpoint {saved.name!r} of step {saved.step}"
    if unrequested:
        _logger.warning("%s: not loaded, because not requested: %s", title, ", ".join(unrequested))
    if plan.unchanged:
        _logger.warning(
            "%s: the position of the iterator is not restored: it was saved on %d ranks, which divided the data "
            "differently; the iterator is unchanged",
            title,
            saved.size,
        )
