"""The manifest of a checkpoint: who wrote it when, the trees of its state, and where each tensor lies.

A checkpoint on one disk (disks.py says which ranks share one) holds the state of the ranks of that disk:

    manifest.json            written last; its own digest inside
    common.safetensors       tensors that are the same on all ranks, written once
    rank-3.safetensors       tensors that are not, each written by the first rank of the disk that has it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torchmn.training.checkpoint import disk
from torchmn.training.checkpoint.errors import Broken

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


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with their sizes; raises `Broken`."""
    try:
        content = json.loads(disk.own_file(directory, disk.MANIFEST).read_bytes())
        digest = content.pop("digest")
        if content["format"] != FORMAT:
            raise Broken(f"expected format {FORMAT!r}, got {content['format']!r}: written by another version")
        if digest != _digest(content):
            raise Broken(f"the checksum of {disk.MANIFEST} is wrong")
        manifest = Manifest(**content)
        _check(manifest)
        for file, size in manifest.files.items():
            found = disk.own_file(directory, file).stat().st_size
            if found != size:
                raise Broken(f"{file}: expected {size} bytes, got {found}")
    except FileNotFoundError as error:
        raise Broken(f"{Path(error.filename).name} is missing: half written, half copied or half removed") from error
    except OSError as error:
        raise Broken(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Broken(f"{disk.MANIFEST} is damaged: {error!r}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raises `Broken` if a manifest names other files than `save` writes: with a path it could name any file."""
    whole = (manifest.step, manifest.number, manifest.size, *manifest.ranks)
    parts = (manifest.entries, manifest.tensors, manifest.files)
    if {type(value) for value in whole} != {int} or {type(part) for part in parts} != {dict}:
        raise Broken(f"{disk.MANIFEST} is damaged: it has values of other kinds than `save` writes")
    if not isinstance(manifest.identity, str):
        raise Broken(f"{disk.MANIFEST} is damaged: its identity is {manifest.identity!r}")
    known = {COMMON, *(file_of(rank) for rank in manifest.ranks)}
    for file in manifest.files:
        if file not in known:
            raise Broken(f"{disk.MANIFEST} names the file {file!r}: expected only names such as {COMMON}, {file_of(0)}")
    for path, place in manifest.tensors.items():
        for _, file in [place["same"]] if "same" in place else place["of_rank"].values():
            if file not in manifest.files:
                raise Broken(f"{disk.MANIFEST}: the tensor {path!r} is in {file!r}, which is not among its files")


def _tensors_of(name: str, contribution: Contribution) -> list[tuple[str, str]]:
    return [(path, d) for path, d in contribution.digests.items() if path.split("/")[0].split("#")[0] == name]


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
