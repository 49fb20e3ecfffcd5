"""create_multi_node_checkpointer: save all ranks' state now and then, and go on from it after a stop."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.parallel.global_state import with_global_state
from torchmn.training.checkpoint import entries, random_states, tensor_files
from torchmn.training.checkpoint.directory import Library, Site, ranks_on_my_disk
from torchmn.training.checkpoint.load import load_newest
from torchmn.training.checkpoint.manifest import (
    CheckpointError,
    Contribution,
    Manifest,
    Place,
    entries_on,
    files_of,
    name_problem,
    tensors_on,
)

_log = logging.getLogger(__name__)


def save_step(site: Site, keep: int | None, step: int, extra: Any, objects: Mapping[str, Any]) -> None:
    """Save one checkpoint, then remove those that are not among the newest `keep` any more."""
    comm, library = site.comm, site.library
    random = random_states.capture(comm.device)
    tensors: dict[str, Tensor] = {}

    def contribute() -> tuple[Contribution, int, str]:
        trees, found = entries.flattened(objects, extra, random)
        tensors.update(found)
        digests = {path: tensor_files.digest(x) for path, x in tensors.items()}
        mine = Contribution({name: json.dumps(tree) for name, tree in trees.items()}, digests)
        return mine, library.last_number(), secrets.token_hex(8)

    told = comm.attempt("save", contribute, raises=CheckpointError)
    place = Place(max(number for _, number, _ in told) + 1, step)
    _write(site, place, told[0][2], [contribution for contribution, _, _ in told], tensors)
    _remove_old(site, keep)


def _write(
    site: Site, place: Place, identity: str, contributions: list[Contribution], tensors: Mapping[str, Tensor]
) -> None:
    """Write the new checkpoint on all disks; what was begun is removed if that fails on one of them."""
    comm, library, ranks = site.comm, site.library, site.disk_ranks
    where = tensors_on(ranks, contributions)
    begun = False

    def begin() -> None:
        nonlocal begun
        if site.leads:
            library.begin(place)
            begun = True

    def write() -> dict[str, int]:
        return library.write(place, files_of(comm.rank, ranks, where), tensors)

    def finish() -> None:
        if site.leads:
            trees = entries_on(ranks, contributions)
            about = (library.name, place.step, place.number, identity, comm.size, ranks)
            library.finish(place, Manifest(*about, trees, where, files))

    try:
        comm.attempt("save", begin, raises=CheckpointError)
        sizes = comm.attempt("save", write, raises=CheckpointError)
        files = {file: size for rank in ranks for file, size in sizes[rank].items()}
        comm.attempt("save", finish, raises=CheckpointError)
    except CheckpointError:
        if begun:
            with suppress(OSError):
                library.abandon(place)
        raise


def _remove_old(site: Site, keep: int | None) -> None:
    """Remove the checkpoints that all disks have, except for the newest `keep`.

    One that another disk lacks stays, because it does not count: it may be all that is left of a run. A damaged one
    does not count either, and goes when it is older than all that stay.
    """
    broken: dict[Place, str] = {}

    def look() -> set | None:
        if not site.leads:
            return None
        whole, found = site.library.look()
        broken.update(found)
        return set(whole) - site.spoiled

    found = site.comm.attempt("save", look, raises=CheckpointError)
    everywhere = set.intersection(*(whole for whole in found if whole is not None))
    places = sorted(place for place, _ in everywhere)
    kept = places if keep is None else places[-keep:]
    if site.leads and kept:
        debris = [] if keep is None else [place for place in broken if place < kept[0]]
        try:
            site.library.remove([*places[: len(places) - len(kept)], *debris])
        except OSError as error:
            _log.warning("torchmn: rank %d: an old checkpoint can not be removed: %s", site.comm.rank, error)


def create_multi_node_checkpointer(
    name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5
) -> MultiNodeCheckpointer:
    """A checkpointer that saves the state of all ranks of `comm` under `name` in the directory `path`.

    The newest `keep` checkpoints stay (all of them with None); older ones go once a newer one is complete. Other names
    may live in the same directory. `path` may differ between ranks, and may be a shared directory or local disks. Every
    rank must call this; a directory that one of them can not write to is an error on all of them, here and now.
    """
    return MultiNodeCheckpointer(name, comm, path, keep)


class MultiNodeCheckpointer:
    """Saves and loads a run's state; every method must be called by all ranks.

    After `maybe_load`, `extra` is what was passed as `extra` to the `save` that was loaded.
    """

    def __init__(self, name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5):
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"create_multi_node_checkpointer: expected comm to be a communicator, got {comm!r}")
        problem = name_problem(name)
        if problem is None and keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            problem = f"expected keep to be an int >= 1, or None to keep all, got {keep!r}"
        directory = Path()
        try:
            directory = Path(os.path.abspath(os.fsdecode(path)))  # a later chdir must not matter
        except TypeError:
            problem = problem or f"expected path to be the path of a directory, got {path!r}"
        operation = "create_multi_node_checkpointer"
        comm.agree(operation, problem, name=name, keep=keep)
        self.keep = keep
        self.extra: Any = None
        self._site = Site(comm, Library(directory, name), ranks_on_my_disk(comm, operation, directory))

    def __repr__(self) -> str:
        return f"<MultiNodeCheckpointer {self._site.library.name!r} in {str(self._site.library.directory)!r}>"

    def save(self, step: int, *, extra: Any = None, **objects: Any) -> None:
        """Save the state of all ranks: the `state_dict` of each of `objects`, `extra`, and the random generators.

        `objects` are models, optimizers, learning-rate schedulers, iterators, whatever has `state_dict` and
        `load_state_dict`, by names of your choice: `save(step, model=model, optimizer=optimizer)`. `extra` is a value
        of your own: numbers, strings, tensors, NumPy arrays, in lists, tuples and dicts. The global generators of
        torch, NumPy and Python are saved too. What is the same on all ranks is written once. Of a parallel model,
        and of its optimizer beside it, the global tensors are saved, so that they load in any grid and mode.

        A checkpoint is complete or does not exist. If this raises `CheckpointError` (on all ranks: a disk is full, a
        value can not be stored), the earlier checkpoints are untouched.
        """
        problem = None
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            problem = f"expected step to be an int >= 0, got {step!r}"
        self._agree("save", problem or entries.objects_problem(objects, "state_dict"), step, objects)
        save_step(self._site, self.keep, step, extra, with_global_state(objects))

    def maybe_load(self, *, step: int | None = None, from_rank: int | None = None, **objects: Any) -> int | None:
        """Load the newest checkpoint that is complete on all ranks, and return its step; None if there is none.

        `objects` are those passed to `save`, by the same names, or some of them. Newest means saved last. `step` asks
        for a certain one (an error if it is not there). A checkpoint that is damaged is skipped, and rank 0 says so.

        On as many ranks as it was saved on, everything comes back bit for bit. On another number of ranks:

        - What was the same on all ranks is loaded on all.
        - Random generators that were not are seeded anew, differently on each rank, and always the same way.
        - An `iterator` that was not stays as it is: its position was one in another division of the data.
        - Anything else that was not is an error, unless `from_rank` says which saved rank's values all ranks take.

        An object that does not fit (the message names the tensor) is an error on all ranks, and nothing is loaded.
        """
        problem = None
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            problem = f"expected step to be an int, got {step!r}"
        if from_rank is not None and (isinstance(from_rank, bool) or not isinstance(from_rank, int) or from_rank < 0):
            problem = f"expected from_rank to be a rank, got {from_rank!r}"
        problem = problem or entries.objects_problem(objects, "load_state_dict")
        self._agree("maybe_load", problem, (step, from_rank), objects)
        loaded = load_newest(self._site, step, from_rank, with_global_state(objects))
        if loaded is None:
            return None
        self.extra = loaded.extra
        return loaded.step

    def _agree(self, operation: str, problem: str | None, step: Any, objects: Mapping[str, Any]) -> None:
        self._site.comm.agree(f"checkpointer.{operation}", problem, step=step, objects=tuple(sorted(objects)))
