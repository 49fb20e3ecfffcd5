"""The manifest of a checkpoint, which lists the saved state and the file of each tensor; names of its directories.

A checkpoint on one disk (see `directory.ranks_on_my_disk`) contains the state of the ranks that share the disk:

    manifest.json            written last; contains a digest of itself
    common.safetensors       tensors that are equal on all ranks, written once
    rank-3.safetensors       other tensors, each written by the first rank of the disk that has it
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
    """State that cannot be stored, written, read or loaded; raised on every rank."""


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read as it was written; the loader logs it and tries the previous one."""


_PATTERN = re.compile(r"(?P<name>.+)\.step-(?P<step>\d{10,})\.save-(?P<number>\d{6,})")
_PARTIAL = ".partial"
LONGEST = 150
"""Maximum bytes of an escaped name: file systems allow 255 for the name of a directory."""


@dataclass(frozen=True, order=True)
class SaveId:
    """One save of a checkpointer. Later saves compare greater, regardless of their step."""

    number: int
    step: int

    def directory(self, name: str) -> str:
        """Returns the name of the directory of this save."""
        return f"{escaped(name)}.step-{self.step:010}.save-{self.number:06}"

    def partial_directory(self, name: str) -> str:
        """Returns the name of the directory while it is being written."""
        return f".{self.directory(name)}{_PARTIAL}"


def name_problem(name: object) -> str | None:
    """Returns why checkpoints cannot have this name, or None."""
    if not isinstance(name, str) or not name:
        return f"expected name to be a non-empty string, got {name!r}"
    try:
        length = len(escaped(name).encode())
    except UnicodeEncodeError:
        return f"expected name to be valid Unicode, got {name!r}"
    if length > LONGEST:
        return f"expected a name of at most {LONGEST} bytes (as a file name), got {length}: {name!r}"
    return None


def escaped(name: str) -> str:
    """Returns `name` as a file name: all but letters and digits of all scripts, space, dot, - and _ becomes %XX.

    Different names have different file names. A leading dot is escaped as well, because the file would be hidden.
    """
    result = "".join(_escaped_character(character) for character in name)
    return "%2E" + result[1:] if result.startswith(".") else result


def _escaped_character(character: str) -> str:
    data = character.encode()  # raises UnicodeEncodeError for lone surrogates
    return character if character.isalnum() or character in " ._-" else "".join(f"%{byte:02X}" for byte in data)


def save_of(directory: str, name: str) -> SaveId | None:
    """Returns the save in the directory of this name, or None if it is not a checkpoint called `name`."""
    match = _PATTERN.fullmatch(directory)
    if match is None or match["name"] != escaped(name):
        return None
    save = SaveId(int(match["number"]), int(match["step"]))
    return save if save.directory(name) == directory else None


def partial_save_of(directory: str, name: str) -> SaveId | None:
    """Returns the save that was being written to `directory`, or None if it is not a partial checkpoint."""
    if not directory.startswith(".") or not directory.endswith(_PARTIAL):
        return None
    return save_of(directory[1 : -len(_PARTIAL)], name)


FORMAT = "torchmn checkpoint 1"
COMMON = "common.safetensors"


@dataclass(frozen=True)
class SavedRankState:
    """One rank's state, as sent to the others: its trees as JSON text, and the digests of its tensors by path."""

    trees: Mapping[str, str]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint directory.

    Attributes:
        name: of the checkpoints.
        step: of the training.
        number: of the save; increases with each save.
        identity: random text, the same on all disks and different for every save.
        size: number of ranks.
        ranks: those that share the disk.
        entries: by name, {"same": tree} if all ranks have the same tree, otherwise {"of_rank": {rank: tree}} with the
            ranks of this disk; and "digest", of the trees and tensors of all ranks. Ranks are strings, as JSON keys.
        tensors: by path, {"same": [digest, file]} or {"of_rank": {rank: [digest, file]}}.
        files: size in bytes by name.
        format: of the manifest.
    """

    name: str
    step: int
    number: int
    identity: str
    size: int
    ranks: Sequence[int]
    entries: Mapping[str, Any]
    tensors: Mapping[str, Any]
    files: Mapping[str, int]
    format: str = FORMAT

    def encode(self) -> bytes:
        """Returns the content of manifest.json, with a digest of itself."""
        content = {"format": self.format, **asdict(self)}  # the format comes first in the file
        return json.dumps({**content, "digest": _digest(content)}).encode()

    def is_common(self, name: str, paths: Sequence[str]) -> bool:
        """Returns whether this entry, with tensors at `paths`, was equal on all ranks."""
        return "same" in self.entries[name] and all("same" in self.tensors[path] for path in paths)


def entries_on(ranks: Sequence[int], states: Sequence[SavedRankState]) -> dict[str, Any]:
    """Returns `Manifest.entries` for a disk that `ranks` share, from the states of all ranks."""
    entries: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in states for name in state.trees):
        trees = [state.trees.get(name) for state in states]
        if len(set(trees)) == 1:
            entries[name] = {"same": json.loads(trees[0] or "")}
        else:
            entries[name] = {"of_rank": {str(rank): json.loads(trees[rank] or "") for rank in ranks if trees[rank]}}
        entries[name]["digest"] = _digest([trees, [_digests_of(name, state) for state in states]])
    return entries


def tensors_on(ranks: Sequence[int], states: Sequence[SavedRankState]) -> dict[str, Any]:
    """Returns `Manifest.tensors` for a disk that `ranks` share, from the states of all ranks."""
    tensors: dict[str, Any] = {}
    for path in dict.fromkeys(path for rank in ranks for path in states[rank].digests):
        digests = [state.digests.get(path) for state in states]
        if len(set(digests)) == 1:
            tensors[path] = {"same": [digests[0], COMMON]}
        else:
            # Of the ranks of the disk with equal tensors, the first writes it.
            files = {digests[rank]: file_of(rank) for rank in reversed(ranks)}
            tensors[path] = {"of_rank": {str(r): [digests[r], files[digests[r]]] for r in ranks if digests[r]}}
    return tensors


def files_of(rank: int, ranks: Sequence[int], tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the files that `rank` writes, on a disk that `ranks` share: the paths of the tensors of each file."""
    files: dict[str, list[str]] = {}
    for path, location in tensors.items():
        if "same" in location:
            if rank == ranks[0]:
                files.setdefault(COMMON, []).append(path)
        elif location["of_rank"].get(str(rank), [None, None])[1] == file_of(rank):
            files.setdefault(file_of(rank), []).append(path)
    return files


def file_of(rank: int) -> str:
    """Returns the name of the file of tensors that `rank` writes and that are not equal on all ranks."""
    return f"rank-{rank}.safetensors"


def read_manifest(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint whose files exist with the right sizes; raises `DamagedCheckpoint`."""
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
    """Raises `DamagedCheckpoint` if a manifest has types or file names that `save` does not write."""
    integers = (manifest.step, manifest.number, manifest.size, *manifest.ranks)
    dicts = (manifest.entries, manifest.tensors, manifest.files)
    if {type(value) for value in integers} != {int} or {type(value) for value in dicts} != {dict}:
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} is damaged: it has values of other types than `save` writes")
    if not isinstance(manifest.identity, str):
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} is damaged: its identity is {manifest.identity!r}")
    known = {COMMON, *(file_of(rank) for rank in manifest.ranks)}
    for file in manifest.files:
        if file not in known:
            raise DamagedCheckpoint(
                f"{durable_files.MANIFEST} names the file {file!r}: expected only names such as {COMMON}, {file_of(0)}"
            )
    for path, location in manifest.tensors.items():
        for _, file in [location["same"]] if "same" in location else location["of_rank"].values():
            if file not in manifest.files:
                raise DamagedCheckpoint(
                    f"{durable_files.MANIFEST}: the tensor {path!r} is in {file!r}, which is not among its files"
                )


def _digests_of(name: str, state: SavedRankState) -> list[tuple[str, str]]:
    return [(path, digest) for path, digest in state.digests.items() if path.split("/")[0].split("#")[0] == name]


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
