"""The checkpoints of one name in one directory: reads, writes and removes them; finds out which ranks share a disk."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.training.checkpoint import durable_files, tensor_files
from torchmn.training.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    SaveId,
    partial_save_of,
    read_manifest,
    save_of,
)
from torchmn.training.checkpoint.state_tree import specs, unflatten
from torchmn.training.checkpoint.tensor_files import Wanted

_logger = logging.getLogger("torchmn.checkpoint")

# More than file systems store inside an inode, so that a full disk is detected.
_PROBE_BYTES = 8192


def ranks_on_my_disk(comm: Communicator, operation: str, path: Path) -> list[int]:
    """Returns the ranks whose `path` is the same directory as this rank's, in order; creates the directory.

    Raises a CheckpointError on all ranks if one of them cannot write there. Each rank writes a file, because
    permissions alone do not show whether it can.
    """
    token = comm.bcast_obj(secrets.token_hex(8))
    markers = [f".torchmn-probe-{token}-{rank}" for rank in range(comm.size)]

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            durable_files.write_durably(path / markers[comm.rank], bytes(_PROBE_BYTES))
        except OSError as error:
            raise OSError(f"cannot write to the directory {str(path)!r}: {error}") from error

    try:
        comm.attempt(operation, write, raises=CheckpointError)
        # By name, because directory listings may be some seconds old on network file systems.
        seen = [(path / marker).exists() for marker in markers]
        sees = comm.allgather_obj(seen)
    finally:
        with suppress(OSError):
            os.unlink(path / markers[comm.rank])
    return connected(comm.rank, sees)


def connected(rank: int, sees: list[list[bool]]) -> list[int]:
    """Returns the ranks connected with `rank`, where two ranks are connected if one sees the file of the other."""
    group, remaining = {rank}, [rank]
    while remaining:
        current = remaining.pop()
        for other in range(len(sees)):
            if other not in group and (sees[current][other] or sees[other][current]):
                group.add(other)
                remaining.append(other)
    return sorted(group)


Identity = tuple[SaveId, str]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint with a valid manifest and files of the right sizes."""

    directory: Path
    manifest: Manifest

    @property
    def identity(self) -> Identity:
        """The same on all disks for one save. Later saves compare greater."""
        return SaveId(self.manifest.number, self.manifest.step), self.manifest.identity

    def differing(self, names: Sequence[str]) -> list[str]:
        """Returns the names of the entries that differed between ranks."""
        result = []
        for name in names:
            trees = self.manifest.entries[name]
            paths = [spec["!tensor"] for spec in specs(trees.get("same"))]
            if not self.manifest.is_common(name, paths):
                result.append(name)
        return result

    def first_difference(self, name: str) -> str:
        """Returns the path of a tensor of the entry that differed between ranks, or else the name of the entry."""
        for spec in specs(self.manifest.entries[name].get("same")):
            if spec["!tensor"] not in self.manifest.common:
                return spec["!tensor"]
        return name

    def tree(self, name: str, rank: int) -> Any:
        """Returns the tree of an entry of saved rank `rank`; raises `DamagedCheckpoint` if it is not on this disk."""
        trees = self.manifest.entries[name]
        if "same" in trees:
            return trees["same"]
        if str(rank) not in trees["of_rank"]:
            raise DamagedCheckpoint(
                f"the {name!r} of rank {rank} is not on this disk, only that of ranks {self.manifest.ranks}"
            )
        return trees["of_rank"][str(rank)]

    def read(
        self, sources: Mapping[str, int], copied_keys: Mapping[str, Iterable[str]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns trees and states of entries; raises `DamagedCheckpoint`.

        Args:
            sources: the saved rank of each entry.
            copied_keys: by name of an entry, the keys of tensors that loading it will copy. They are mapped files.
        """
        try:
            return self._read(sources, copied_keys)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
            # The checksum is right, so another program wrote it.
            raise DamagedCheckpoint(
                f"the state in {durable_files.MANIFEST} is not as `save` writes it: {error!r}"
            ) from error

    def _read(
        self, sources: Mapping[str, int], copied_keys: Mapping[str, Iterable[str]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = {name: self.tree(name, rank) for name, rank in sources.items()}
        wanted = {name: specs(tree) for name, tree in trees.items()}
        copied = {name: {f"{name}/{key}" for key in copied_keys.get(name, ())} for name in trees}
        # A tensor that two entries share is kept if one of them keeps it.
        kept = set().union(*({spec["!tensor"] for spec in wanted[name]} - copied[name] for name in trees))
        states: dict[str, Any] = {}
        # Entries of one rank are read together, so that a tensor that two entries share is one tensor again.
        for rank in sorted(set(sources.values())):
            names = [name for name in sources if sources[name] == rank]
            mappable = {path for name in names for path in copied[name]} - kept
            tensors = self._tensors([spec for name in names for spec in wanted[name]], rank, mappable)
            states.update({name: unflatten(trees[name]["state"], tensors) for name in names})
        return trees, states

    def _tensors(self, wanted: Sequence[dict[str, Any]], rank: int, mappable: Container[str]) -> dict[str, Tensor]:
        by_file: dict[str, dict[str, Wanted]] = {}
        for spec in wanted:
            path = spec["!tensor"]
            found = self.manifest.location(path, rank)
            if found is None:
                raise DamagedCheckpoint(f"the tensor {path!r} of rank {rank} is not on this disk")
            description, file = found
            by_file.setdefault(file, {})[path] = Wanted(spec, description, path in mappable)
        result: dict[str, Tensor] = {}
        for file, parts in by_file.items():
            result.update(tensor_files.read(self.directory / file, self.manifest.headers.get(file), parts))
        return result

    def seed(self, name: str, rank: int, size: int) -> int:
        """Returns a seed of 63 bits for a generator on `rank` of `size`, derived from the states of all saved ranks."""
        text = f"{self.manifest.entries[name]['digest']} {name} {rank} of {size}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def has(self, name: str, rank: int) -> bool:
        """Returns whether saved rank `rank` had this entry, according to this disk."""
        trees = self.manifest.entries.get(name, {})
        return "same" in trees or str(rank) in trees.get("of_rank", {})


def open_snapshot(directory: Path, save: SaveId, name: str) -> Snapshot:
    """Returns the checkpoint in `directory`; raises `DamagedCheckpoint` if it is not this save."""
    manifest = read_manifest(directory)
    if (manifest.name, SaveId(manifest.number, manifest.step)) != (name, save):
        raise DamagedCheckpoint(f"it holds {manifest.name!r}, step {manifest.step}, save {manifest.number}: renamed?")
    return Snapshot(directory, manifest)


Stamp = dict[str, tuple[int, int]]
"""Size and time of the last change of files, by name."""


class Known(NamedTuple):
    """A checkpoint that was complete when its files had this stamp."""

    identity: Identity
    stamp: Stamp


class CheckpointDirectory:
    """The checkpoints of one name in a directory. Other files in it are not touched."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self._complete: dict[SaveId, Known] = {}

    def last_number(self) -> int:
        """Returns the highest number of a save that was begun here, 0 if there is none."""
        partial = (partial_save_of(file, self.name) for file in os.listdir(self.path))
        return max((save.number for save in (*self.saves(), *partial) if save is not None), default=0)

    def saves(self) -> list[SaveId]:
        """Returns the saves that have a directory, the last one last."""
        found = (save_of(file, self.name) for file in os.listdir(self.path))
        return sorted(save for save in found if save is not None)

    def open(self, save: SaveId) -> Snapshot:
        """Returns a checkpoint that is complete, by manifest and sizes; raises `DamagedCheckpoint`."""
        return open_snapshot(self.final(save), save, self.name)

    def complete(self) -> tuple[set[Identity], list[SaveId]]:
        """Returns which checkpoints are complete, and the others; reads only what has changed since the last call."""
        known, self._complete = self._complete, {}
        broken: list[SaveId] = []
        for save in self.saves():
            try:
                if save not in known or stamp_of(self.final(save), known[save].stamp) != known[save].stamp:
                    self._complete[save] = self._known(self.open(save))
                else:
                    self._complete[save] = known[save]
            except (DamagedCheckpoint, OSError):
                broken.append(save)
        return {each.identity for each in self._complete.values()}, broken

    def begin(self, save: SaveId) -> None:
        """Creates the partial directory of a new checkpoint."""
        os.mkdir(self.partial(save))

    def finish(self, save: SaveId, manifest: Manifest, entries: Mapping[str, str]) -> None:
        """Turns the partial directory into a checkpoint, atomically. See `Manifest.encode`."""
        partial = self.partial(save)
        durable_files.remove_messages(partial)
        durable_files.write_durably(partial / durable_files.MANIFEST, manifest.encode(entries))
        durable_files.publish(partial, self.final(save))
        self._complete[save] = self._known(Snapshot(self.final(save), manifest))

    def abandon(self, save: SaveId) -> None:
        """Removes the partial directory of a save that failed on a rank, at once for all ranks that write to it."""
        abandoned = self.path / save.abandoned_directory(self.name)
        with suppress(OSError):  # another rank has done so
            os.rename(self.partial(save), abandoned)
            durable_files.remove(abandoned)

    def remove(self, saves: Iterable[SaveId]) -> None:
        """Removes these checkpoints, and all partial directories, which unfinished saves have left."""
        for save in saves:
            durable_files.remove(self.final(save))
        for file in os.listdir(self.path):
            if partial_save_of(file, self.name) is not None:
                durable_files.remove(self.path / file)

    def partial(self, save: SaveId) -> Path:
        """Returns the directory of a save while it is being written."""
        return self.path / save.partial_directory(self.name)

    def final(self, save: SaveId) -> Path:
        """Returns the directory of a checkpoint."""
        return self.path / save.directory(self.name)

    def _known(self, snapshot: Snapshot) -> Known:
        files = (durable_files.MANIFEST, *snapshot.manifest.files)
        return Known(snapshot.identity, stamp_of(snapshot.directory, files))


def stamp_of(directory: Path, files: Iterable[str]) -> Stamp:
    """Returns the stamp of files in a directory."""
    found = {file: os.stat(directory / file) for file in files}
    return {file: (status.st_size, status.st_mtime_ns) for file, status in found.items()}


@dataclass
class CheckpointStore:
    """The ranks that save together, and this rank's directory.

    Attributes:
        comm: communicator of the ranks.
        directory: this rank's directory, which other ranks may share.
        disk_ranks: the ranks that share it.
        unreadable: checkpoints that are complete, but were damaged when they were read.
    """

    comm: Communicator
    directory: CheckpointDirectory
    disk_ranks: list[int]
    unreadable: set[Identity] = field(default_factory=set)

    @property
    def leads(self) -> bool:
        """Whether this rank acts for all ranks of its disk."""
        return self.comm.rank == self.disk_ranks[0]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks share one disk."""
        return len(self.disk_ranks) == self.comm.size

    def remove_old(self, keep: int | None, on_all_disks: Set[Identity], broken: Iterable[SaveId]) -> None:
        """Removes the checkpoints that all disks have, except the newest `keep`, on the disk that this rank leads.

        A checkpoint that another disk lacks does not count and is not removed: it may be the last of another run. A
        damaged one does not count either, and is removed if it is older than all that are kept.

        Args:
            keep: number of checkpoints to keep; None keeps all.
            on_all_disks: those that are complete on all disks.
            broken: the others on this disk.
        """
        saves = sorted(save for save, _ in on_all_disks - self.unreadable)
        kept = saves if keep is None else saves[-keep:]
        if not self.leads or not kept:
            return
        damaged = [] if keep is None else [save for save in broken if save < kept[0]]
        try:
            self.directory.remove([*saves[: len(saves) - len(kept)], *damaged])
        except OSError as error:
            _logger.warning("torchmn: rank %d: cannot remove an old checkpoint: %s", self.comm.rank, error)
