"""One checkpoint as one rank finds it on its disk: which of its state this rank takes, and reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from torchmn.training.checkpoint import disk, manifest, tensor_files
from torchmn.training.checkpoint.errors import Broken
from torchmn.training.checkpoint.manifest import Manifest
from torchmn.training.checkpoint.names import Place
from torchmn.training.checkpoint.tree import specs, unflatten

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
        """The tree of an entry as saved rank `rank` had it; raises `Broken` if it is not on this disk."""
        trees = self.manifest.entries[name]
        if "same" in trees:
            return trees["same"]
        if str(rank) not in trees["of_rank"]:
            raise Broken(f"the {name!r} of rank {rank} is not on this disk, only that of ranks {self.manifest.ranks}")
        return trees["of_rank"][str(rank)]

    def read(self, sources: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees and states of entries, each as the saved rank `sources[name]` had it; raises `Broken`."""
        try:
            return self._read(sources)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
            # Its checksum is right: somebody else's program wrote it.
            raise Broken(f"the state in {disk.MANIFEST} is not as `save` writes it: {error!r}") from error

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
                raise Broken(f"the tensor {spec['!tensor']!r} of rank {rank} is not on this disk")
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
    """The checkpoint in `directory`; raises `Broken`."""
    found = manifest.read(directory)
    if (found.name, Place(found.number, found.step)) != (name, place):
        raise Broken(f"it holds {found.name!r}, step {found.step}, save {found.number}: renamed?")
    return Snapshot(directory, found)
