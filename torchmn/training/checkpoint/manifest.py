"""The manifest of a checkpoint: who wrote it when, the trees of its state, and where each tensor lies.

A checkpoint on one disk (disks.py says which ranks share one) holds the state of the ranks of that disk:

    manifest.json            written last; its own digest inside
    common.safetensors       tensors that are the same on all ranks, written once
    rank-3.safetensors       tensors that are not, each written by the first rank of the disk that has it
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torchmn.errors import TorchMNError
from torchmn.training.checkpoint import durable_files


class CheckpointError(TorchMNError):
    """State that can not be stored, written, read or loaded; raised on every rank."""


class DamagedCheckpoint(Exception):
    """A checkpoint that can not be read as it was written. The loader catches it, says so and looks further."""


_PATTERN = re.compile(r"(?P<name>.+)\.step-(?P<step>\d{10,})\.save-(?P<number>\d{6,})")
_PARTIAL = ".partial"
LONGEST = 150
"""Bytes of an escaped name: file systems allow 255 for the whole."""


@dataclass(frozen=True, order=True)
class Place:
    """One save of a checkpointer. Later saves compare greater, whatever their step."""

    number: int
    step: int

    def directory(self, name: str) -> str:
        return f"{escaped(name)}.step-{self.step:010}.save-{self.number:06}"

    def partial_directory(self, name: str) -> str:
        return f".{self.directory(name)}{_PARTIAL}"


def name_problem(name: object) -> str | None:
    """Why `name` can not name checkpoints, or None."""
    if not isinstance(name, str) or not name:
        return f"expected name to be a string that is not empty, got {name!r}"
    try:
        length = len(escaped(name).encode())
    except UnicodeEncodeError:
        return f"expected name to be valid Unicode, got {name!r}"
    if length > LONGEST:
        return f"expected a name of at most {LONGEST} bytes (as a file name), got {length}: {name!r}"
    return None


def escaped(name: str) -> str:
    """`name` as a file name: letters and digits of all scripts, spaces, dots, - and _ stay; the rest becomes %XX.

    Different names stay different. A dot in front is escaped too: the file would be hidden.
    """
    result = "".join(_escaped_character(character) for character in name)
    return "%2E" + result[1:] if result.startswith(".") else result


def _escaped_character(character: str) -> str:
    data = character.encode()  # lone surrogates are no characters: UnicodeEncodeError
    return character if character.isalnum() or character in " ._-" else "".join(f"%{byte:02X}" for byte in data)


def place_of(directory: str, name: str) -> Place | None:
    """The save that lies in `directory`, or None if that is no checkpoint called `name`."""
    match = _PATTERN.fullmatch(directory)
    if match is None or match["name"] != escaped(name):
        return None
    place = Place(int(match["number"]), int(match["step"]))
    return place if place.directory(name) == directory else None


def partial_place_of(directory: str, name: str) -> Place | None:
    """The save that was being written to `directory`, or None if that is something else."""
    if not directory.startswith(".") or not directory.endswith(_PARTIAL):
        return None
    return place_of(directory[1 : -len(_PARTIAL)], name)


FORMAT = "torchmn checkpoint 1"
COMMON = "common.safetensors"


@dataclass(frozen=True)
class Contribution:
    """One rank's state, as it tells the others: its trees as JSON text, and its tensors' digests by path."""

    trees: Mapping[str, str]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """What lies in one checkpoint directory.

    `entries[name]` is {"same": tree} if all ranks have the same tree, else {"of_rank": {rank: tree}} with
    those of the ranks of this disk; and "digest", of all ranks' trees and tensors. `tensors[path]` is
    {"same": [digest, file]} or {"of_rank": {rank: [digest, file]}}. Ranks are strings, as JSON wants its keys.
    """

    name: str
    step: int
    number: int
    identity: str  # the same on all disks, and different for every save
    size: int
    ranks: Sequence[int]
    entries: Mapping[str, Any]
    tensors: Mapping[str, Any]
    files: Mapping[str, int]
    format: str = FORMAT

    def encode(self) -> bytes:
        content = {"format": self.format, **asdict(self)}  # first, where a reader looks
        return json.dumps({**content, "digest": _digest(content)}).encode()

    def is_common(self, name: str, paths: Sequence[str]) -> bool:
        """Whether all ranks had the same in this entry, which has tensors at `paths`."""
        return "same" in self.entries[name] and all("same" in self.tensors[path] for path in paths)


def entries_on(ranks: Sequence[int], told: Sequence[Contribution]) -> dict[str, Any]:
    """The manifest's entries on a disk of these `ranks`, where rank i told `told[i]`."""
    entries: dict[str, Any] = {}
    for name in dict.fromkeys(name for contribution in told for name in contribution.trees):
        trees = [contribution.trees.get(name) for contribution in told]
        if len(set(trees)) == 1:
            entries[name] = {"same": json.loads(trees[0] or "")}
        else:
            entries[name] = {"of_rank": {str(rank): json.loads(trees[rank] or "") for rank in ranks if trees[rank]}}
        entries[name]["digest"] = _digest([trees, [_tensors_of(name, contribution) for contribution in told]])
    return entries


def tensors_on(ranks: Sequence[int], told: Sequence[Contribution]) -> dict[str, Any]:
    """The manifest's tensors on a disk of these `ranks`, where rank i told `told[i]`."""
    tensors: dict[str, Any] = {}
    for path in dict.fromkeys(path for rank in ranks for path in told[rank].digests):
        digests = [contribution.digests.get(path) for contribution in told]
        if len(set(digests)) == 1:
            tensors[path] = {"same": [digests[0], COMMON]}
        else:
            # The first rank of the disk with these bits writes them, for itself and for the others.
            files = {digests[rank]: file_of(rank) for rank in reversed(ranks)}
            tensors[path] = {"of_rank": {str(r): [digests[r], files[digests[r]]] for r in ranks if digests[r]}}
    return tensors


def files_of(rank: int, ranks: Sequence[int], tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """What `rank` has to write, on its disk of these `ranks`: the paths of the tensors of each file."""
    files: dict[str, list[str]] = {}
    for path, place in tensors.items():
        if "same" in place:
            if rank == ranks[0]:
                files.setdefault(COMMON, []).append(path)
        elif place["of_rank"].get(str(rank), [None, None])[1] == file_of(rank):
            files.setdefault(file_of(rank), []).append(path)
    return files


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with their sizes; raises `DamagedCheckpoint`."""
    try:
        content = json.loads(durable_files.own_file(directory, durable_files.MANIFEST).read_bytes())
        digest = content.pop("digest")
        if content["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"expected format {FORMAT!r}, got {content['format']!r}: written by another version"
            )
        if digest != _digest(content):
            raise DamagedCheckpoint(f"the checksum of {durable_files.MANIFEST} is wrong")
        manifest = Manifest(**content)
        _check(manifest)
        for file, size in manifest.files.items():
            found = durable_files.own_file(directory, file).stat().st_size
            if found != size:
                raise DamagedCheckpoint(f"{file}: expected {size} bytes, got {found}")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(
            f"{Path(error.filename).name} is missing: half written, half copied or half removed"
        ) from error
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} is damaged: {error!r}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raises `DamagedCheckpoint` if a manifest names files that `save` does not write."""
    whole = (manifest.step, manifest.number, manifest.size, *manifest.ranks)
    parts = (manifest.entries, manifest.tensors, manifest.files)
    if {type(value) for value in whole} != {int} or {type(part) for part in parts} != {dict}:
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} is damaged: it has values of other kinds than `save` writes")
    if not isinstance(manifest.identity, str):
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} is damaged: its identity is {manifest.identity!r}")
    known = {COMMON, *(file_of(rank) for rank in manifest.ranks)}
    for file in manifest.files:
        if file not in known:
            raise DamagedCheckpoint(
                f"{durable_files.MANIFEST} names the file {file!r}: expected only names such as {COMMON}, {file_of(0)}"
            )
    for path, place in manifest.tensors.items():
        for _, file in [place["same"]] if "same" in place else place["of_rank"].values():
            if file not in manifest.files:
                raise DamagedCheckpoint(
                    f"{durable_files.MANIFEST}: the tensor {path!r} is in {file!r}, which is not among its files"
                )


def _tensors_of(name: str, contribution: Contribution) -> list[tuple[str, str]]:
    return [(path, d) for path, d in contribution.digests.items() if path.split("/")[0].split("#")[0] == name]


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
