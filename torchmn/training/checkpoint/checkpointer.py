"""`create_multi_node_checkpointer`: saves the state of all ranks, and restores it to resume a run."""

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
from torchmn.training.checkpoint.directory import CheckpointDirectory, CheckpointStore, Identity, ranks_on_my_disk
from torchmn.training.checkpoint.load import load_newest
from torchmn.training.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    SavedRankState,
    SaveId,
    entries_on,
    files_of,
    name_problem,
    tensors_on,
)

_logger = logging.getLogger("torchmn.checkpoint")


def save_step(store: CheckpointStore, keep: int | None, step: int, extra: Any, objects: Mapping[str, Any]) -> None:
    """Saves one checkpoint, then removes all but the newest `keep`."""
    comm, directory = store.comm, store.directory
    random = random_states.capture(comm.device)
    tensors: dict[str, Tensor] = {}

    def collect() -> tuple[SavedRankState, int, str]:
        trees, found = entries.flattened(objects, extra, random)
        tensors.update(found)
        digests = {path: tensor_files.digest(x) for path, x in tensors.items()}
        state = SavedRankState({name: json.dumps(tree) for name, tree in trees.items()}, digests)
        return state, directory.last_number(), secrets.token_hex(8)

    ranks = comm.attempt("save", collect, raises=CheckpointError)
    save = SaveId(max(number for _, number, _ in ranks) + 1, step)
    _write(store, save, ranks[0][2], [state for state, _, _ in ranks], tensors)
    _remove_old(store, keep)


def _write(
    store: CheckpointStore, save: SaveId, identity: str, states: list[SavedRankState], tensors: Mapping[str, Tensor]
) -> None:
    """Writes the new checkpoint on all disks; if that fails on one of them, removes the partial ones."""
    comm, directory, ranks = store.comm, store.directory, store.disk_ranks
    locations = tensors_on(ranks, states)
    begun = False

    def begin() -> None:
        nonlocal begun
        if store.leads:
            directory.begin(save)
            begun = True

    def write() -> dict[str, int]:
        return directory.write(save, files_of(comm.rank, ranks, locations), tensors)

    def finish() -> None:
        if store.leads:
            trees = entries_on(ranks, states)
            header = (directory.name, save.step, save.number, identity, comm.size, ranks)
            directory.finish(save, Manifest(*header, trees, locations, files))

    try:
        comm.attempt("save", begin, raises=CheckpointError)
        sizes = comm.attempt("save", write, raises=CheckpointError)
        files = {file: size for rank in ranks for file, size in sizes[rank].items()}
        comm.attempt("save", finish, raises=CheckpointError)
    except CheckpointError:
        if begun:
            with suppress(OSError):
                directory.abandon(save)
        raise


def _remove_old(store: CheckpointStore, keep: int | None) -> None:
    """Removes the checkpoints that all disks have, except the newest `keep`.

    A checkpoint that another disk lacks does not count and is not removed: it may be the last of another run. A damaged
    one does not count either, and is removed if it is older than all that are kept.
    """
    broken: dict[SaveId, str] = {}

    def scan() -> set[Identity] | None:
        if not store.leads:
            return None
        complete, found = store.directory.scan()
        broken.update(found)
        return set(complete) - store.unreadable

    disks = store.comm.attempt("save", scan, raises=CheckpointError)
    on_all_disks = set.intersection(*(complete for complete in disks if complete is not None))
    saves = sorted(save for save, _ in on_all_disks)
    kept = saves if keep is None else saves[-keep:]
    if store.leads and kept:
        damaged = [] if keep is None else [save for save in broken if save < kept[0]]
        try:
            store.directory.remove([*saves[: len(saves) - len(kept)], *damaged])
        except OSError as error:
            _logger.warning("torchmn: rank %d: cannot remove an old checkpoint: %s", store.comm.rank, error)


def create_multi_node_checkpointer(
    name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5
) -> MultiNodeCheckpointer:
    """Returns a checkpointer that saves the state of all ranks in the directory `path`; all ranks must call.

    Args:
        name: of the checkpoints; a directory may contain those of several names.
        comm: communicator whose ranks save and load together.
        path: a shared directory or local disks; may differ between ranks. Created if it does not exist.
        keep: number of newest checkpoints to keep; older ones are removed once a new one is complete. None keeps all.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        CheckpointError: on every rank, if one of them cannot write to its directory.
        MismatchError: on every rank, if `name` or `keep` differ between ranks.
    """
    return MultiNodeCheckpointer(name, comm, path, keep)


class MultiNodeCheckpointer:
    """Saves and loads the state of a run; all ranks must call every method. See `create_multi_node_checkpointer`.

    Attributes:
        keep: number of newest checkpoints to keep; None keeps all.
        extra: after `maybe_load`, the value that was passed as `extra` to `save`.
    """

    def __init__(self, name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5):
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"create_multi_node_checkpointer: expected comm to be a communicator, got {comm!r}")
        problem = name_problem(name)
        if problem is None and keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            problem = f"expected keep to be an int >= 1, or None to keep all, got {keep!r}"
        directory = Path()
        try:
            directory = Path(os.path.abspath(os.fsdecode(path)))  # absolute, in case of a later chdir
        except TypeError:
            problem = problem or f"expected path to be the path of a directory, got {path!r}"
        operation = "create_multi_node_checkpointer"
        comm.agree(operation, problem, name=name, keep=keep)
        self.keep = keep
        self.extra: Any = None
        disk_ranks = ranks_on_my_disk(comm, operation, directory)
        self._store = CheckpointStore(comm, CheckpointDirectory(directory, name), disk_ranks)

    def __repr__(self) -> str:
        return f"<MultiNodeCheckpointer {self._store.directory.name!r} in {str(self._store.directory.path)!r}>"

    def save(self, step: int, *, extra: Any = None, **objects: Any) -> None:
        """Saves the state of all ranks: the `state_dict` of `objects`, `extra`, and the global random generators.

        The generators are those of torch, NumPy and Python. State that is equal on all ranks is written once. Of a
        parallel model, and of its optimizer if saved together with it, the global tensors are saved, so that they can
        be loaded in any grid and mode. A checkpoint is complete or does not exist.

        Args:
            step: an int >= 0, the same on all ranks.
            extra: any value of numbers, strings, tensors and NumPy arrays, in lists, tuples and dicts.
            objects: what has `state_dict` and `load_state_dict`: models, optimizers, learning-rate schedulers,
                iterators, by any names: `save(step, model=model, optimizer=optimizer)`.

        Raises:
            CheckpointError: on every rank, if a disk is full or a value cannot be stored; earlier checkpoints are kept.
        """
        problem = None
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            problem = f"expected step to be an int >= 0, got {step!r}"
        self._agree("save", problem or entries.objects_problem(objects, "state_dict"), step, objects)
        save_step(self._store, self.keep, step, extra, with_global_state(objects))

    def maybe_load(self, *, step: int | None = None, from_rank: int | None = None, **objects: Any) -> int | None:
        """Loads the checkpoint that was saved last and is complete on all ranks; damaged ones are skipped.

        On as many ranks as it was saved on, the state is restored bit for bit. On another number of ranks, state that
        was equal on all ranks is loaded on all; of state that differed between ranks:

        - random generators get a new seed, different on each rank and reproducible;
        - an `iterator` keeps its state, because the position was in another division of the data;
        - anything else raises, unless `from_rank` names the saved rank whose values all ranks load.

        Args:
            step: load the checkpoint of this step.
            from_rank: the saved rank whose values to load, where they differed and the number of ranks has changed.
            objects: those passed to `save`, by the same names, or some of them.

        Returns:
            The step of the checkpoint; None if there is none.

        Raises:
            CheckpointError: on every rank, if an object does not fit the checkpoint (the message names the tensor), or
                there is no checkpoint of `step`; then nothing is loaded.
        """
        problem = None
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            problem = f"expected step to be an int, got {step!r}"
        if from_rank is not None and (isinstance(from_rank, bool) or not isinstance(from_rank, int) or from_rank < 0):
            problem = f"expected from_rank to be a rank, got {from_rank!r}"
        problem = problem or entries.objects_problem(objects, "load_state_dict")
        self._agree("maybe_load", problem, (step, from_rank), objects)
        loaded = load_newest(self._store, step, from_rank, with_global_state(objects))
        if loaded is None:
            return None
        self.extra = loaded.extra
        return loaded.step

    def _agree(self, operation: str, problem: str | None, step: Any, objects: Mapping[str, Any]) -> None:
        self._store.comm.agree(f"checkpointer.{operation}", problem, step=step, objects=tuple(sorted(objects)))
