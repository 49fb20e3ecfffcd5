"""The manifest of a checkpoint, which lists the saved state and the file of each tensor; names of its directories.

A checkpoint on one disk (see `directory.ranks_on_my_disk`) contains the state of the ranks that share the disk:

    manifest.json            written last; contains a digest of itself
    common.safetensors       tensors that are equal on all ranks, written once
    rank-3.safetensors       other tensors, each written by the first rank of the disk that has it

Format 1 has other digests of tensors, and none of the headers of files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from torchmn.errors import TorchMNError
from torchmn.training.checkpoint import durable_files, random_states


class CheckpointError(TorchMNError):
    """State that cannot be stored, written, read or loaded; raised on every rank."""


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read as it was written; the loader logs it and tries the previous one."""


_PATTERN = re.compile(r"(?P<name>.+)\.step-(?P<step>\d{10,})\.save-(?P<number>\d{6,})")
_PARTIAL = ".partial"
_ABANDONED = ".abandoned"
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

    def abandoned_directory(self, name: str) -> str:
        """Returns the name of the directory while it is being removed, because a rank could not write it."""
        return f".{self.directory(name)}{_ABANDONED}"


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
    stem, dot, ending = directory.rpartition(".")
    if not directory.startswith(".") or dot + ending not in (_PARTIAL, _ABANDONED):
        return None
    return save_of(stem[1:], name)


FORMAT = "torchmn checkpoint 2"
FORMATS = ("torchmn checkpoint 1", FORMAT)
COMMON = "common.safetensors"


class SavedRankState(NamedTuple):
    """One rank's state, as sent to the others: its trees as JSON text, and descriptions of its tensors by path."""

    trees: Mapping[str, str]
    tensors: Mapping[str, str]


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
        common: descriptions (see `tensor_files.description`) of the tensors that all ranks have, by path.
        differing: of the other tensors, by path and rank, description and file. Ranks are strings, as JSON keys.
        files: size in bytes by name.
        headers: digest of the header of each file; none in format 1.
        entries: by name, {"same": tree} if all ranks have the same tree, otherwise {"of_rank": {rank: tree}} with the
            ranks of this disk; and of random generators "digest", of the trees and tensors of all ranks.
        format: of the manifest.
    """

    name: str
    step: int
    number: int
    identity: str
    size: int
    ranks: Sequence[int]
    common: Mapping[str, str]
    differing: Mapping[str, Mapping[str, Sequence[str]]]
    files: Mapping[str, int]
    headers: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    def encode(self, entries: Mapping[str, str]) -> bytes:
        """Returns the content of manifest.json, with a digest of itself.

        Args:
            entries: as JSON texts, in the place of `self.entries`.

        Returns:
            JSON text, encoded.
        """
        fields = {"format": self.format, **vars(self)}  # the format comes first in the file
        del fields["entries"]
        texts = ", ".join(f"{json.dumps(name)}: {text}" for name, text in entries.items())
        content = f'{json.dumps(fields)[:-1]}, "entries": {{{texts}}}}}'.encode()
        return content[:-1] + b', "digest": "%b"}' % _digest(content).encode()

    def is_common(self, name: str, paths: Sequence[str]) -> bool:
        """Returns whether this entry, with tensors at `paths`, was equal on all ranks."""
        return "same" in self.entries[name] and all(path in self.common for path in paths)

    def location(self, path: str, rank: int) -> tuple[str, str] | None:
        """Returns description and file of a tensor of a rank; None if it is not on this disk."""
        if path in self.common:
            return self.common[path], COMMON
        description, file = self.differing.get(path, {}).get(str(rank), (None, None))
        return None if description is None or file is None else (description, file)


def entries_on(ranks: Sequence[int], states: Sequence[SavedRankState]) -> dict[str, str]:
    """Returns `Manifest.entries` as JSON texts for a disk that `ranks` share, from the states of all ranks."""
    entries: dict[str, str] = {}
    for name in dict.fromkeys(name for state in states for name in state.trees):
        trees = [state.trees.get(name) for state in states]
        if len(set(trees)) == 1:
            text = f'"same": {trees[0]}'
        else:
            texts = ", ".join(f'"{rank}": {trees[rank]}' for rank in ranks if trees[rank])
            text = f'"of_rank": {{{texts}}}'
        if name.startswith(random_states.PREFIX):
            tensors = [[item for item in state.tensors.items() if item[0].startswith(name)] for state in states]
            text += f', "digest": "{_digest(json.dumps([trees, tensors]).encode())}"'
        entries[name] = f"{{{text}}}"
    return entries


def tensors_on(
    ranks: Sequence[int], states: Sequence[SavedRankState]
) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Returns `Manifest.common` and `Manifest.differing` for a disk that `ranks` share, from all ranks' states."""
    first, *others = [state.tensors for state in states]
    common = {path: text for path, text in first.items() if all(other.get(path) == text for other in others)}
    differing: dict[str, dict[str, list[str]]] = {}
    for path in dict.fromkeys(path for rank in ranks for path in states[rank].tensors if path not in common):
        texts = {rank: states[rank].tensors[path] for rank in ranks if path in states[rank].tensors}
        # Of the ranks of the disk with equal tensors, the first writes it.
        files = {text: file_of(rank) for rank, text in reversed(texts.items())}
        differing[path] = {str(rank): [text, files[text]] for rank, text in texts.items()}
    return common, differing


def files_of(
    rank: int, ranks: Sequence[int], common: Mapping[str, str], differing: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, Set[str]]:
    """Returns the files that `rank` writes, on a disk that `ranks` share: the paths of the tensors of each file."""
    mine = {path for path, of_rank in differing.items() if of_rank.get(str(rank), ("", ""))[1] == file_of(rank)}
    files: dict[str, Set[str]] = {COMMON: common.keys()} if rank == ranks[0] and common else {}
    return files | {file_of(rank): mine} if mine else files


def file_of(rank: int) -> str:
    """Returns the name of the file of tensors that `rank` writes and that are not equal on all ranks."""
    return f"rank-{rank}.safetensors"


def read_manifest(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint whose files exist with the right sizes; raises `DamagedCheckpoint`."""
    try:
        data = durable_files.own_file(directory, durable_files.MANIFEST).read_bytes()
        content = json.loads(data)
        digest = content.pop("digest")
        if content["format"] not in FORMATS:
            raise DamagedCheckpoint(
                f"expected format {' or '.join(map(repr, FORMATS))}, got {content['format']!r}: written by another "
                "version"
            )
        if digest != _digest(data[: data.rindex(b', "digest": ')] + b"}"):
            raise DamagedCheckpoint(f"the checksum of {durable_files.MANIFEST} is wrong")
        manifest = Manifest(**(content if content["format"] == FORMAT else _from_format_1(content)))
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
    dicts = (manifest.entries, manifest.common, manifest.differing, manifest.files, manifest.headers)
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
    if manifest.format == FORMAT and manifest.headers.keys() != manifest.files.keys():
        raise DamagedCheckpoint(f"{durable_files.MANIFEST} does not have a checksum of the header of each file")
    for path, of_rank in manifest.differing.items():
        _check_files(manifest, path, *(file for _, file in of_rank.values()))
    if manifest.common:
        _check_files(manifest, next(iter(manifest.common)), COMMON)


def _check_files(manifest: Manifest, path: str, *files: str) -> None:
    for file in files:
        if file not in manifest.files:
            raise DamagedCheckpoint(
                f"{durable_files.MANIFEST}: the tensor {path!r} is in {file!r}, which is not among its files"
            )


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a manifest of format 1 in the present form, but with digests for descriptions.

    In format 1, "tensors" has by path {"same": [digest, file]} or {"of_rank": {rank: [digest, file]}}.
    """
    tensors = content.pop("tensors")
    for path, location in tensors.items():
        if "same" in location and location["same"][1] != COMMON:
            raise DamagedCheckpoint(f"{durable_files.MANIFEST}: the tensor {path!r} is not in {COMMON}")
    common = {path: location["same"][0] for path, location in tensors.items() if "same" in location}
    differing = {path: location["of_rank"] for path, location in tensors.items() if "same" not in location}
    return {**content, "common": common, "differing": differing}


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
