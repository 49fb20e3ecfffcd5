"""The checkpoints of one name on one rank's disk: finding them, writing the next, removing the old."""

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
    Place,
    partial_place_of,
    place_of,
    read_manifest,
)
from torchmn.training.checkpoint.state_tree import specs, unflatten

# More than file systems keep inside an inode: a full disk must fail here.
_PROBE_BYTES = 8192


def ranks_on_my_disk(comm: Communicator, operation: str, path: Path) -> list[int]:
    """The ranks that see the same directory at their own `path`, in order; makes the directory.

    Raises on all ranks if one of them can not write there (tried out: permissions do not tell it all).
    """
    token = comm.bcast_obj(secrets.token_hex(8))
    markers = [f".torchmn-probe-{token}-{rank}" for rank in range(comm.size)]

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            durable_files.write_durably(path / markers[comm.rank], bytes(_PROBE_BYTES))
        except OSError as error:
            raise OSError(f"can not write to the directory {str(path)!r}: {error}") from error

    try:
        comm.attempt(operation, write, raises=CheckpointError)
        # By name, not by a listing: those may be some seconds old on network file systems.
        seen = [(path / marker).exists() for marker in markers]
        sees = comm.allgather_obj(seen)
    finally:
        with suppress(OSError):
            os.unlink(path / markers[comm.rank])
    return connected(comm.rank, sees)


def connected(rank: int, sees: list[list[bool]]) -> list[int]:
    """All ranks that see `rank`'s file, or whose file it sees, directly or through others."""
    group, waiting = {rank}, [rank]
    while waiting:
        here = waiting.pop()
        for other in range(len(sees)):
            if other not in group and (sees[here][other] or sees[other][here]):
                group.add(other)
                waiting.append(other)
    return sorted(group)


Identity = tuple[Place, str]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint whose manifest is good and whose files have their sizes."""

    directory: Path
    manifest: Manifest

    @property
    def identity(self) -> Identity:
        """What the parts of one save on all disks have in common. Later saves compare greater."""
        return Place(self.manifest.number, self.manifest.step), self.manifest.identity

    def differing(self, names: Sequence[str]) -> list[str]:
        """Those of the entries that were not the same on all ranks."""
        result = []
        for name in names:
            trees = self.manifest.entries[name]
            paths = [spec["!tensor"] for spec in specs(trees.get("same"))]
            if not self.manifest.is_common(name, paths):
                result.append(name)
        return result

    def first_difference(self, name: str) -> str:
        """A tensor of the entry that was not the same on all ranks, or the entry."""
        for spec in specs(self.manifest.entries[name].get("same")):
            if "same" not in self.manifest.tensors[spec["!tensor"]]:
                return spec["!tensor"]
        return name

    def tree(self, name: str, rank: int) -> Any:
        """The tree of an entry as saved rank `rank` had it; raises `DamagedCheckpoint` if it is not on this disk."""
        trees = self.manifest.entries[name]
        if "same" in trees:
            return trees["same"]
        if str(rank) not in trees["of_rank"]:
            raise DamagedCheckpoint(
                f"the {name!r} of rank {rank} is not on this disk, only that of ranks {self.manifest.ranks}"
            )
        return trees["of_rank"][str(rank)]

    def read(self, sources: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees and states of entries, each as the saved rank `sources[name]` had it; or `DamagedCheckpoint`."""
        try:
            return self._read(sources)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
            # Its checksum is right: somebody else's program wrote it.
            raise DamagedCheckpoint(
                f"the state in {durable_files.MANIFEST} is not as `save` writes it: {error!r}"
            ) from error

    def _read(self, sources: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = {name: self.tree(name, rank) for name, rank in sources.items()}
        states: dict[str, Any] = {}
        # Tensors that two entries share must come back as one, so entries of one rank are read together.
        for rank in sorted(set(sources.values())):
            names = [name for name in sources if sources[name] == rank]
            tensors = self._tensors([spec for name in names for spec in specs(trees[name])], rank)
            states.update({name: unflatten(trees[name]["state"], tensors) for name in names})
        return trees, states

    def _tensors(self, wanted: Sequence[dict[str, Any]], rank: int) -> dict[str, Tensor]:
        by_file: dict[str, dict[str, tuple[dict[str, Any], str]]] = {}
        for spec in wanted:
            place = self.manifest.tensors[spec["!tensor"]]
            found = place.get("same") or place["of_rank"].get(str(rank))
            if found is None:
                raise DamagedCheckpoint(f"the tensor {spec['!tensor']!r} of rank {rank} is not on this disk")
            by_file.setdefault(found[1], {})[spec["!tensor"]] = (spec, found[0])
        result: dict[str, Tensor] = {}
        for file, parts in by_file.items():
            result.update(tensor_files.read(self.directory / file, list(parts.values())))
        return result

    def seed(self, name: str, rank: int, size: int) -> int:
        """A seed of 63 bits for an entry's generator on `rank` of `size`, derived from all saved ranks' states."""
        text = f"{self.manifest.entries[name]['digest']} {name} {rank} of {size}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def has(self, name: str, rank: int) -> bool:
        """Whether saved rank `rank` had this entry, as far as this disk knows."""
        trees = self.manifest.entries.get(name, {})
        return "same" in trees or str(rank) in trees.get("of_rank", {})


def open_snapshot(directory: Path, place: Place, name: str) -> Snapshot:
    """The checkpoint in `directory`; or `DamagedCheckpoint`."""
    found = read_manifest(directory)
    if (found.name, Place(found.number, found.step)) != (name, place):
        raise DamagedCheckpoint(f"it holds {found.name!r}, step {found.step}, save {found.number}: renamed?")
    return Snapshot(directory, found)


class Library:
    """A directory that may hold checkpoints of this name among other files. All others are left alone."""

    def __init__(self, directory: Path, name: str):
        self.directory = directory
        self.name = name

    def last_number(self) -> int:
        """The highest number of a save that was begun here, 0 if there is none."""
        partial = (partial_place_of(file, self.name) for file in os.listdir(self.directory))
        return max((place.number for place in (*self._places(), *partial) if place is not None), default=0)

    def look(self) -> tuple[dict[Identity, Snapshot], dict[Place, str]]:
        """The checkpoints that look whole, and what is wrong with each of the others."""
        whole: dict[Identity, Snapshot] = {}
        broken: dict[Place, str] = {}
        for place in self._places():
            try:
                snapshot = open_snapshot(self.directory / place.directory(self.name), place, self.name)
                whole[snapshot.identity] = snapshot
            except DamagedCheckpoint as problem:
                broken[place] = str(problem)
        return whole, broken

    def begin(self, place: Place) -> None:
        """Make room for a new checkpoint."""
        os.mkdir(self._partial(place))

    def write(self, place: Place, files: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Write files of the new checkpoint: these paths of `tensors` to each. Returns their sizes."""
        sizes = {}
        for file, paths in files.items():
            target = self._partial(place) / file
            tensor_files.write(target, {path: tensors[path] for path in paths})
            durable_files.sync(target)
            sizes[file] = target.stat().st_size
        return sizes

    def finish(self, place: Place, manifest: Manifest) -> None:
        """Turn what was written into a checkpoint, all at once."""
        partial = self._partial(place)
        durable_files.write_durably(partial / durable_files.MANIFEST, manifest.encode())
        durable_files.publish(partial, self.directory / place.directory(self.name))

    def abandon(self, place: Place) -> None:
        """Remove what this rank began, of a save that failed."""
        partial, final = self._partial(place), self.directory / place.directory(self.name)
        durable_files.remove(partial if partial.exists() else final)

    def remove(self, places: Iterable[Place]) -> None:
        """Remove these checkpoints, and what earlier runs left of saves that they did not finish."""
        for place in places:
            durable_files.remove(self.directory / place.directory(self.name))
        for file in os.listdir(self.directory):
            if partial_place_of(file, self.name) is not None:
                durable_files.remove(self.directory / file)

    def _places(self) -> list[Place]:
        found = (place_of(file, self.name) for file in os.listdir(self.directory))
        return sorted(place for place in found if place is not None)

    def _partial(self, place: Place) -> Path:
        return self.directory / place.partial_directory(self.name)


@dataclass
class Site:
    """The ranks that save together, and this rank's disk among theirs."""

    comm: Communicator
    library: Library
    disk_ranks: list[int]
    """The ranks that see this rank's directory."""
    spoiled: set[Identity] = field(default_factory=set)
    """Checkpoints that look whole, and were found damaged when they were read."""

    @property
    def leads(self) -> bool:
        """Whether this rank acts for all ranks on its disk."""
        return self.comm.rank == self.disk_ranks[0]
