"""BackgroundSave: the part of a save that runs in a thread, while the training continues.

The threads of the ranks that share a disk must not use the communicator, which the main threads use. They exchange
files in the partial directory of the checkpoint:

    state-3.message      what rank 3 has: the trees of its entries, and the digests of its tensors
    written-3.message    the files that rank 3 has written, which are on disk

The first rank of the disk publishes the checkpoint when all have written. A rank that fails renames and removes the
partial directory: the others, which no longer find it, fail, too. Removing works even if the disk is full.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchmn.communicators.agreement import failure_text
from torchmn.training.checkpoint import tensor_files
from torchmn.training.checkpoint.directory import CheckpointStore
from torchmn.training.checkpoint.durable_files import MESSAGE
from torchmn.training.checkpoint.manifest import (
    Manifest,
    SavedRankState,
    SaveId,
    entries_on,
    files_of,
    tensors_on,
)
from torchmn.training.checkpoint.state_copy import StateCopy
from torchmn.training.checkpoint.tensor_files import WrittenFile

Found = TypeVar("Found")

_ANOTHER_FAILED = "another rank could not write its part"
_SHORTEST_WAIT, _LONGEST_WAIT = 0.001, 0.02  # seconds between two looks for a file


@dataclass(frozen=True)
class BackgroundSave:
    """One rank's part of a save, whose partial directory exists.

    Attributes:
        store: where to save.
        save: which save.
        identity: random text, the same on all ranks.
        trees: of the entries, by name.
        copy: the tensors, which must not change before the save has ended.
        states: of all ranks, if they have exchanged them; required if they do not share one disk.
        keep: number of newest checkpoints to keep; None keeps all.
    """

    store: CheckpointStore
    save: SaveId
    identity: str
    trees: Mapping[str, Any]
    copy: StateCopy
    states: Sequence[SavedRankState] | None
    keep: int | None

    def run(self) -> None:
        """Writes this rank's files and waits until the checkpoint is complete on this disk.

        Raises:
            OSError: a rank of this disk could not write.
        """
        try:
            self._run()
        except Exception as error:  # of any type: the other ranks must not wait for this one
            # Another rank that fails removes the directory, also while this one writes to it.
            problem = _ANOTHER_FAILED if self._is_abandoned() else failure_text(error)
            self.store.directory.abandon(self.save)
            raise OSError(f"step {self.save.step}: {problem}") from error

    def _run(self) -> None:
        comm, directory, ranks = self.store.comm, self.store.directory, self.store.disk_ranks
        states = self.states
        if states is None:
            received = self._exchange("state", state_of(self.trees, self.copy), ranks)
            states = [SavedRankState(*received[rank]) for rank in ranks]
        common, differing = tensors_on(ranks, states)
        partial = directory.partial(self.save)
        written = {
            file: tensor_files.write(partial / file, self.copy, paths)
            for file, paths in files_of(comm.rank, ranks, common, differing).items()
        }
        if not self.store.leads:
            self._send("written", written)
            self._wait_until_complete()
            return
        received = self._exchange("written", written, ranks)
        files = {file: WrittenFile(*each) for rank in ranks for file, each in received[rank].items()}
        manifest = Manifest(
            *(directory.name, self.save.step, self.save.number, self.identity, comm.size, ranks),
            common=common,
            differing=differing,
            files={file: each.size for file, each in files.items()},
            headers={file: each.header for file, each in files.items()},
        )
        directory.finish(self.save, manifest, entries_on(ranks, states))
        if self.store.is_shared:  # otherwise other disks may not have this checkpoint
            self.store.remove_old(self.keep, *directory.complete())

    def _exchange(self, kind: str, content: Any, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns the contents of all `ranks`, this one's included."""
        mine = self.store.comm.rank
        if len(ranks) > 1:
            self._send(kind, content)
        return {rank: content if rank == mine else self._receive(kind, rank) for rank in ranks}

    def _send(self, kind: str, content: Any) -> None:
        file = self._message(kind, self.store.comm.rank)
        unfinished = file.with_name(f"unfinished-{file.name}")
        unfinished.write_text(json.dumps(content))
        os.rename(unfinished, file)  # the others read all of it, or do not find it

    def _receive(self, kind: str, rank: int) -> Any:
        def read() -> Any:
            # By name, because directory listings may be some seconds old on network file systems.
            try:
                return json.loads(self._message(kind, rank).read_bytes())
            except FileNotFoundError:
                return None

        return self._wait_for(read, f"rank {rank} has not written its part")

    def _message(self, kind: str, rank: int) -> Path:
        return self.store.directory.partial(self.save) / f"{kind}-{rank}{MESSAGE}"

    def _wait_until_complete(self) -> None:
        leader = self.store.disk_ranks[0]
        self._wait_for(lambda: self._is_complete() or None, f"rank {leader} has not completed it")

    def _is_complete(self) -> bool:
        return self.store.directory.final(self.save).exists()

    def _is_abandoned(self) -> bool:
        return not self.store.directory.partial(self.save).exists() and not self._is_complete()

    def _wait_for(self, look: Callable[[], Found | None], problem: str) -> Found:
        """Returns what `look` finds. Raises if a rank has failed, or with the `problem` at the timeout."""
        limit = self.store.comm.settings.timeout
        deadline, seconds = time.monotonic() + limit, _SHORTEST_WAIT
        while True:
            found = look()
            if found is not None:
                return found
            if self._is_abandoned():
                raise OSError(_ANOTHER_FAILED)
            if time.monotonic() > deadline:
                raise OSError(f"{problem} after {limit:g} s (TORCHMN_TIMEOUT)")
            time.sleep(seconds)
            seconds = min(1.5 * seconds, _LONGEST_WAIT)


def state_of(trees: Mapping[str, Any], copy: StateCopy) -> SavedRankState:
    """Returns what this rank saves, for the other ranks."""
    tensors = {path: tensor_files.description(place, copy.bytes_of(place)) for path, place in copy.places.items()}
    return SavedRankState({name: json.dumps(tree) for name, tree in trees.items()}, tensors)
