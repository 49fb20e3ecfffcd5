"""`create_multi_node_checkpointer`: saves the state of all ranks, and restores it to resume a run."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmn.communicators.background_tasks import BackgroundTask
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.context import collections_paused
from torchmn.other_spellings import advice_for, other_spellings
from torchmn.parallel.global_state import with_global_state
from torchmn.training.checkpoint import entries, random_states
from torchmn.training.checkpoint.background_save import BackgroundSave, state_of
from torchmn.training.checkpoint.directory import CheckpointDirectory, CheckpointStore, Identity, ranks_on_my_disk
from torchmn.training.checkpoint.load import load_newest
from torchmn.training.checkpoint.manifest import CheckpointError, SavedRankState, SaveId, name_problem
from torchmn.training.checkpoint.state_copy import StateCopy

_logger = logging.getLogger("torchmn.checkpoint")


class Copied(NamedTuple):
    """What ranks exchange when each has copied its state."""

    last_number: int  # of the saves on this rank's disk
    token: str
    state: SavedRankState | None


@other_spellings
def create_multi_node_checkpointer(
    name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5
) -> MultiNodeCheckpointer:
    """Returns a checkpointer that saves the state of all ranks in the directory `path`; all ranks must call.

    Args:
        name: of the checkpoints; a directory may contain those of several names.
        comm: communicator whose ranks save and load together.
        path: a shared directory or local disks; may differ between ranks. Created if it does not exist.
        keep: number of newest checkpoints to keep; older ones are removed once a new one is complete. None keeps all.

    Returns:
        The checkpointer, with `save` and `maybe_load`.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        CheckpointError: on every rank, if one of them cannot write to its directory.
        MismatchError: on every rank, if `name` or `keep` differ between ranks.
    """
    return MultiNodeCheckpointer(name, comm, path, keep)


class MultiNodeCheckpointer:
    """Saves and loads the state of a run; all ranks must call every method. See `create_multi_node_checkpointer`.

    Args:
        name: of the run.
        comm: communicator of all ranks.
        path: directory of the checkpoints.
        keep: number of newest checkpoints to keep; None keeps all.

    Attributes:
        keep: number of newest checkpoints to keep; None keeps all.
        extra: after `maybe_load`, the value that was passed as `extra` to `save`.
    """

    def __init__(self, name: str, comm: Communicator, path: str | os.PathLike[str], keep: int | None = 5):
        comm = as_communicator(comm, "create_multi_node_checkpointer")
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
        self._has_common_disk = all(comm.agree(operation, differ=self._store.is_shared))
        self._copy = StateCopy()
        self._last: BackgroundTask | None = None

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> Any:
            instead = None if name.startswith("_") else advice_for(f"MultiNodeCheckpointer.{name}")
            hint = f"; instead: {instead}" if instead else ""
            raise AttributeError(f"'MultiNodeCheckpointer' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<MultiNodeCheckpointer {self._store.directory.name!r} in {str(self._store.directory.path)!r}>"

    @other_spellings
    def save(self, step: int, *, extra: Any = None, **objects: Any) -> None:
        """Copies the state of all ranks and returns; a thread writes it, while the training continues.

        The state is the `state_dict` of `objects`, `extra`, and the global random generators of torch, NumPy and
        Python. State that is equal on all ranks is written once. Of a parallel model, and of its optimizer if saved
        together with it, the global tensors are saved, so that they can be loaded in any grid and mode.

        A checkpoint is complete or does not exist. It is complete when `wait`, the next `save`, or `comm.finalize` has
        returned, and when the process has ended without an error. If it cannot be written, the next of these raises on
        every rank, or the next step of a multi-node optimizer of the same communicator.

        Args:
            step: an int >= 0, the same on all ranks.
            extra: any value of numbers, strings, tensors and NumPy arrays, in lists, tuples and dicts.
            objects: what has `state_dict` and `load_state_dict`: models, optimizers, learning-rate schedulers,
                iterators, by any names: `save(step, model=model, optimizer=optimizer)`.

        Raises:
            CheckpointError: on every rank, if a value cannot be stored, or if the previous checkpoint could not be
                written, because a disk is full for example; earlier checkpoints are kept.
        """
        problem = None
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            problem = f"expected step to be an int >= 0, got {step!r}"
        self._agree("save", problem or entries.objects_problem(objects, "state_dict"), step, objects)
        self.wait()  # its copy is overwritten
        store, trees = self._store, {}
        objects = with_global_state(objects)

        def copy() -> Copied:
            with collections_paused():
                flattened, tensors = entries.flattened(objects, extra, random_states.capture(store.comm.device))
                self._copy.take(tensors)
            trees.update(flattened)
            # Ranks without a common disk cannot compare their states in the background.
            state = None if self._has_common_disk else state_of(trees, self._copy)
            return Copied(store.directory.last_number(), secrets.token_hex(8), state)

        ranks = store.comm.attempt("save", copy, raises=CheckpointError)
        save = SaveId(max(rank.last_number for rank in ranks) + 1, step)
        self._begin(save)
        states = [rank.state for rank in ranks if rank.state is not None]
        work = BackgroundSave(store, save, ranks[0].token, trees, self._copy, states or None, self.keep)
        self._last = store.comm.background.start("save", work.run, CheckpointError)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete on all ranks; every rank must call it.

        Raises:
            CheckpointError: on every rank, if a rank could not write its part.
        """
        last, self._last = self._last, None
        if last is None:
            return
        self._store.comm.attempt("save", last.result, raises=CheckpointError)
        if not self._has_common_disk:
            self._remove_old()

    def _begin(self, save: SaveId) -> None:
        """Creates the partial directory of a checkpoint on all disks, or on none."""
        directory, begun = self._store.directory, False

        def begin() -> None:
            nonlocal begun
            if self._store.leads:
                directory.begin(save)
                begun = True

        try:
            self._store.comm.attempt("save", begin, raises=CheckpointError)
        except CheckpointError:
            if begun:
                directory.abandon(save)
            raise

    def _remove_old(self) -> None:
        """Removes old checkpoints from several disks: those that all disks have, except the newest."""
        complete: set[Identity] = set()
        broken: list[SaveId] = []

        def scan() -> set[Identity] | None:
            nonlocal complete, broken
            if not self._store.leads:
                return None
            complete, broken = self._store.directory.complete()
            return complete - self._store.unreadable

        disks = self._store.comm.attempt("save", scan, raises=CheckpointError)
        self._store.remove_old(self.keep, set.intersection(*(disk for disk in disks if disk is not None)), broken)

    @other_spellings
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
        self.wait()
        with collections_paused():
            loaded = load_newest(self._store, step, from_rank, with_global_state(objects))
        if loaded is None:
            return None
        self.extra = loaded.extra
        if self._store.comm.rank == 0:
            _logger.info("torchmn: checkpoint %r of step %d was loaded", self._store.directory.name, loaded.step)
        return loaded.step

    def _agree(self, operation: str, problem: str | None, step: Any, objects: Mapping[str, Any]) -> None:
        self._store.comm.agree(f"checkpointer.{operation}", problem, step=step, objects=tuple(sorted(objects)))
