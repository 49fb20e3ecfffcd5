"""The checkpoints of one name on one rank's disk: finding them, writing the next, removing the old."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from torchmn.training.checkpoint import disk, names, tensor_files
from torchmn.training.checkpoint.errors import Broken
from torchmn.training.checkpoint.manifest import Manifest
from torchmn.training.checkpoint.names import Place
from torchmn.training.checkpoint.snapshot import Identity, Snapshot, open_snapshot


class Library:
    """A directory that may hold checkpoints of this name among other files. All others are left alone."""

    def __init__(self, directory: Path, name: str):
        self.directory = directory
        self.name = name

    def last_number(self) -> int:
        """The highest number of a save that was begun here, 0 if there is none."""
        partial = (names.partial_place_of(file, self.name) for file in os.listdir(self.directory))
        return max((place.number for place in (*self._places(), *partial) if place is not None), default=0)

    def look(self) -> tuple[dict[Identity, Snapshot], dict[Place, str]]:
        """The checkpoints that look whole, and what is wrong with each of the others."""
        whole: dict[Identity, Snapshot] = {}
        broken: dict[Place, str] = {}
        for place in self._places():
            try:
                snapshot = open_snapshot(self.directory / place.directory(self.name), place, self.name)
                whole[snapshot.identity] = snapshot
            except Broken as problem:
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
            disk.sync(target)
            sizes[file] = target.stat().st_size
        return sizes

    def finish(self, place: Place, manifest: Manifest) -> None:
        """Turn what was written into a checkpoint, all at once."""
        partial = self._partial(place)
        disk.write_durably(partial / disk.MANIFEST, manifest.encode())
        disk.publish(partial, self.directory / place.directory(self.name))

    def abandon(self, place: Place) -> None:
        """Remove what this rank began, of a save that failed."""
        partial, final = self._partial(place), self.directory / place.directory(self.name)
        disk.remove(partial if partial.exists() else final)

    def remove(self, places: Iterable[Place]) -> None:
        """Remove these checkpoints, and what earlier runs left of saves that they did not finish."""
        for place in places:
            disk.remove(self.directory / place.directory(self.name))
        for file in os.listdir(self.directory):
            if names.partial_place_of(file, self.name) is not None:
                disk.remove(self.directory / file)

    def _places(self) -> list[Place]:
        found = (names.place_of(file, self.name) for file in os.listdir(self.directory))
        return sorted(place for place in found if place is not None)

    def _partial(self, place: Place) -> Path:
        return self.directory / place.partial_directory(self.name)
