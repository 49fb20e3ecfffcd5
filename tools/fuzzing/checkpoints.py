"""Damaged manifests and tensor files of checkpoints, most of them with checksums that fit, and damaged weights."""

from __future__ import annotations

import copy
import functools
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import torchmn
from tools.fuzzing.mutations import changed_json, json_text, mutated
from tools.fuzzing.subject import Subject
from torchmn.errors import ArgumentError
from torchmn.training.checkpoint.manifest import CheckpointError

NAME = "run.step-0000000007.save-000001"
MANIFEST, TENSORS = "manifest.json", "common.safetensors"

torch.optim.SGD([torch.zeros(1)], lr=1)  # imports here what each worker would import


class _Parts:
    """Objects that are saved and loaded."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model[1](self.model[0](torch.ones(2, 3))).sum().backward()
        self.optimizer.step()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    @property
    def named(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


@functools.cache
def _comm() -> torchmn.Communicator:
    logging.getLogger("torchmn.checkpoint").setLevel(logging.CRITICAL)
    return torchmn.create_communicator("solo")


@functools.cache
def _saved() -> dict[str, bytes]:
    """Returns the files of a checkpoint by name."""
    folder = Path(tempfile.mkdtemp())
    extra = {"x": (1, None, 2**70, float("nan"), b"x", {1: 2}), "array": torch.ones(2).numpy()}
    checkpointer = torchmn.create_multi_node_checkpointer("run", _comm(), folder)
    checkpointer.save(7, extra=extra, **_Parts().named)
    checkpointer.wait()
    files = {path.name: path.read_bytes() for path in (folder / NAME).iterdir()}
    shutil.rmtree(folder)
    return files


def _with_digest(content: Any) -> bytes:
    text = json_text(content)
    return text[:-1] + b', "digest": "%b"}' % blake2b(text, digest_size=16).hexdigest().encode()


def _manifest(draw: random.Random) -> bytes:
    """Returns a damaged manifest, in nine of ten cases with the right checksum."""
    whole = _saved()[MANIFEST]
    if draw.random() < 0.1:
        return mutated(draw, whole, (_saved()[TENSORS],))
    content = json.loads(whole)
    del content["digest"]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        key = draw.choice([*content, "entries", "entries", "entries", "differing", "common"])
        if draw.random() < 0.1 or key not in content:
            content = copy.deepcopy(content)
            content.pop(key, None)
        else:
            content = {**content, key: changed_json(draw, content[key])}
    return _with_digest(content)


def _read_manifest(path: Path) -> None:
    (path.parent / TENSORS).write_bytes(_saved()[TENSORS])
    _load(path.parent.parent)


def _tensors(draw: random.Random) -> bytes:
    """Returns a damaged tensor file, in most cases with a header that is JSON of the right length."""
    whole = _saved()[TENSORS]
    if draw.random() < 0.3:
        return mutated(draw, whole, (_saved()[MANIFEST],))
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    for _ in range(draw.choice((1, 1, 2, 4))):
        header = changed_json(draw, header)
    text = json_text(header)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data[: draw.choice((None, None, None, 0, 7))]


def _read_tensors(path: Path) -> None:
    """Loads a checkpoint whose manifest has the size and the checksum of the header of this file."""
    whole = path.read_bytes() if path.is_file() and path.stat().st_size else b""
    content = json.loads(_saved()[MANIFEST])
    del content["digest"]
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    content["files"][TENSORS] = len(whole)
    content["headers"][TENSORS] = blake2b(header, digest_size=16).hexdigest()
    (path.parent / MANIFEST).write_bytes(_with_digest(content))
    _load(path.parent.parent)


def _load(folder: Path) -> None:
    """Loads the checkpoint; it is skipped, loaded, or a CheckpointError, and then nothing is loaded."""
    parts = _Parts()
    loaded = torchmn.create_multi_node_checkpointer("run", _comm(), folder).maybe_load(**parts.named)
    if loaded is None:
        raise CheckpointError(f"{folder}: skipped")
    parts.model[0](torch.ones(2, 3))


def _weights(form: str, draw: random.Random) -> bytes:
    whole = _weights_file(form)
    if form == "safetensors" and draw.random() < 0.6:
        size = int.from_bytes(whole[:8], "little")
        text = json_text(changed_json(draw, json.loads(whole[8 : 8 + size])))
        return len(text).to_bytes(8, "little") + text + whole[8 + size :]
    return mutated(draw, whole, (whole,))


@functools.cache
def _weights_file(form: str) -> bytes:
    state = {name: x.contiguous() for name, x in _Parts().model.state_dict().items()}
    if form == "safetensors":
        return save(state)
    file = Path(tempfile.mkdtemp()) / "weights.pt"
    torch.save(state, file)
    content = file.read_bytes()
    shutil.rmtree(file.parent)
    return content


def _read_weights(path: Path) -> None:
    torchmn.load_weights(_Parts().model, path)


def _subject(
    name: str, file: str, content: Callable[[random.Random], bytes], read: Callable[[Path], object]
) -> Subject:
    return Subject(name, file, content, read, (CheckpointError,), "checkpoints", names_file=False)


SUBJECTS = (
    _subject("manifests", f"{NAME}/{MANIFEST}", _manifest, _read_manifest),
    _subject("tensor files", f"{NAME}/{TENSORS}", _tensors, _read_tensors),
    *(
        Subject(
            f"weights, {form}",
            f"weights.{form}",
            functools.partial(_weights, form),
            _read_weights,
            (ArgumentError,),
            "weights",
        )
        for form in ("safetensors", "pt")
    ),
)
