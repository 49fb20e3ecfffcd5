"""The checkpoints of one name in one directory: reads, writes and removes them; finds out which ranks share a disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

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
            if "same" not in self.manifest.tensors[spec["!tensor"]]:
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

    def read(self, sources: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns trees and states of entries, each of the saved rank `sources[name]`; raises `DamagedCheckpoint`."""
        try:
            return self._read(sources)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
            # The checksum is right, so another program wrote it.
            raise DamagedCheckpoint(
                f"the state in {durable_files.MANIFEST} is not as `save` writes it: {error!r}"
            ) from error

    def _read(self, sources: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = {name: self.tree(name, rank) for name, rank in sources.items()}
        states: dict[str, Any] = {}
        # Entries of one rank are read together, so that a tensor that two entries share is one tensor again.
        for rank in sorted(set(sources.values())):
            names = [name for name in sources if sources[name] == rank]
            tensors = self._tensors([spec for name in names for spec in specs(trees[name])], rank)
            states.update({name: unflatten(trees[name]["state"], tensors) for name in names})
        return trees, states

    def _tensors(self, wanted: Sequence[dict[str, Any]], rank: int) -> dict[str, Tensor]:
        by_file: dict[str, dict[str, tuple[dict[str, Any], str]]] = {}
        for spec in wanted:
            location = self.manifest.tensors[spec["!tensor"]]
            found = location.get("same") or location["of_rank"].get(str(rank))
            if found is None:
                raise DamagedCheckpoint(f"the tensor {spec['!tensor']!r} of rank {rank} is not on this disk")
            digest, file = found
            by_file.setdefault(file, {})[spec["!tensor"]] = (spec, digest)
        result: dict[str, Tensor] = {}
        for file, parts in by_file.items():
            result.update(tensor_files.read(self.directory / file, list(parts.values())))
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


class CheckpointDirectory:
    """The checkpoints of one name in a directory. Other files in it are not touched."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name

    def last_number(self) -> int:
        """Returns the highest number of a save that was begun here, 0 if there is none."""
        partial = (partial_save_of(file, self.name) for file in os.listdir(self.path))
        return max((save.number for save in (*self._saves(), *partial) if save is not None), default=0)

    def scan(self) -> tuple[dict[Identity, Snapshot], dict[SaveId, str]]:
        """Returns the checkpoints that are complete, by manifest and sizes, and the problem of each of the others."""
        complete: dict[Identity, Snapshot] = {}
        broken: dict[SaveId, str] = {}
        for save in self._saves():
            try:
                snapshot = open_snapshot(self._final(save), save, self.name)
                complete[snapshot.identity] = snapshot
            except DamagedCheckpoint as problem:
                broken[save] = str(problem)
        return complete, broken

    def begin(self, save: SaveId) -> None:
        """Creates the partial directory of a new checkpoint."""
        os.mkdir(self._partial(save))

    def write(self, save: SaveId, files: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Writes files of the new checkpoint, each with some paths of `tensors`. Returns the sizes of the files."""
        sizes = {}
        for file, paths in files.items():
            target = self._partial(save) / file
            tensor_files.write(target, {path: tensors[path] for path in paths})
            durable_files.sync(target)
            sizes[file] = target.stat().st_size
        return sizes

    def finish(self, save: SaveId, manifest: Manifest) -> None:
        """Turns the partial directory into a checkpoint, atomically."""
        partial = self._partial(save)
        durable_files.write_durably(partial / durable_files.MANIFEST, manifest.encode())
        durable_files.publish(partial, self._final(save))

    def abandon(self, save: SaveId) -> None:
        """Removes the directory of a save that failed."""
        partial = self._partial(save)
        durable_files.remove(partial if partial.exists() else self._final(save))

    def remove(self, saves: Iterable[SaveId]) -> None:
        """Removes these checkpoints, and all partial directories, which unfinished saves have left."""
        for save in saves:
            durable_files.remove(self._final(save))
        for file in os.listdir(self.path):
            if partial_save_of(file, self.name) is not None:
                durable_files.remove(self.path / file)

    def _saves(self) -> list[SaveId]:
        found = (save_of(file, self.name) for file in os.listdir(self.path))
        return sorted(save for save in found if save is not None)

    def _partial(self, save: SaveId) -> Path:
        return self.path / save.partial_directory(self.name)

    def _final(self, save: SaveId) -> Path:
        return self.path / save.directory(self.name)


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
