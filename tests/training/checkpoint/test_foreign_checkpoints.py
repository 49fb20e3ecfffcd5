"""Checkpoints from untrusted sources: no file outside of their directory is read, and malformed ones are skipped."""

from __future__ import annotations

import json
import os
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpoint.test_checkpoint_damage import load, two_checkpoints


def rewritten(checkpoint: Path, change: Any) -> None:
    """Writes the manifest with a change, and with a valid checksum."""
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_bytes())
    del content["digest"]
    change(content)
    digest = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    file.write_text(json.dumps({**content, "digest": digest}))


def renamed(old: str, new: str) -> Any:
    """Returns a change that moves the tensors of one file to another."""

    def change(content: dict[str, Any]) -> None:
        for by_file in (content["files"], content["headers"]):
            by_file[new] = by_file.pop(old)
        for of_rank in content["differing"].values():
            for place in of_rank.values():
                place[1] = new if place[1] == old else place[1]

    return change


@pytest.mark.parametrize("name", ["../../x.safetensors", "{outside}", "inner/common.safetensors", "rank-7.safetensors"])
def test_a_manifest_names_no_file_but_those_that_save_writes(name, tmp_path, caplog):
    newer, outside = two_checkpoints(tmp_path / "a" / "b"), tmp_path / "a" / "x.safetensors"
    (newer / "inner").mkdir()
    for copy in (outside, newer / "inner" / "common.safetensors", newer / "rank-7.safetensors"):
        shutil.copy(newer / "common.safetensors", copy)  # with the right content
    name = name.format(outside=outside)
    assert (newer / name).exists()
    rewritten(newer, renamed("common.safetensors", name))
    with caplog.at_level("INFO", "torchmn"):
        assert load(newer.parent) == [1, 1]
    assert f"names the file '{name}'" in caplog.text and "step 2 (save 2) is skipped" in caplog.text
    assert "of step 1 was loaded" in caplog.text


def test_a_manifest_with_a_tensor_in_an_unlisted_file_is_skipped(tmp_path, caplog):
    newer = two_checkpoints(tmp_path)

    def change(content: dict[str, Any]) -> None:
        next(iter(content["differing"].values()))["0"][1] = "../x.safetensors"

    rewritten(newer, change)
    assert load(tmp_path) == [1, 1]
    assert "is in '../x.safetensors', which is not among its files" in caplog.text


@pytest.mark.parametrize("file", ["manifest.json", "common.safetensors"])
def test_a_link_out_of_a_checkpoint_is_not_followed(file, tmp_path, caplog):
    newer = two_checkpoints(tmp_path / "runs")
    (newer / file).rename(tmp_path / "elsewhere")
    (newer / file).symlink_to(tmp_path / "elsewhere")
    assert load(tmp_path / "runs") == [1, 1]
    assert f"{file} is a link to a file outside of its checkpoint" in caplog.text


def test_a_link_to_a_moved_checkpoint_is_read(tmp_path):
    newer = two_checkpoints(tmp_path / "runs")
    shutil.move(newer, tmp_path / "elsewhere")
    newer.symlink_to(tmp_path / "elsewhere")
    assert load(tmp_path / "runs") == [2, 2]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("file", ["manifest.json", "common.safetensors"])
def test_a_pipe_instead_of_a_file_does_not_block(file, tmp_path, caplog):
    newer = two_checkpoints(tmp_path)
    (newer / file).unlink()
    os.mkfifo(newer / file)
    assert load(tmp_path) == [1, 1]
    assert f"{file} is not a regular file" in caplog.text


def spec_of(tree: Any) -> dict[str, Any]:
    """The first tensor of a tree."""
    if isinstance(tree, dict) and "!tensor" in tree:
        return tree
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return next(filter(None, (spec_of(item) for item in inner)), {})


def with_spec(**values: Any) -> Any:
    """Returns a change of the first tensor of the model's tree."""
    return lambda content: spec_of(content["entries"]["model"]).update(values)


def described(text: Any) -> Any:
    """Returns a change of the description of a tensor of the model."""

    def change(content: dict[str, Any]) -> None:
        path = spec_of(content["entries"]["model"])["!tensor"]
        content["common"][path] = text.format(*content["common"][path].split()) if isinstance(text, str) else text

    return change


CHANGES: dict[str, Any] = {
    "another attribute of torch": described("load {1} {2}"),
    "another dtype": described("float32 {1} {2}"),
    "no dtype": described(["float64"]),
    "no shape": described("{0} abc {2}"),
    "another shape": described("{0} 1x{1} {2}"),
    "a negative shape": described("{0} -6x-4 {2}"),
    "a huge shape": described("{0} 0x" + "9" * 30 + " {2}"),
    "no digest": described("{0} {1}"),
    "strides of a huge tensor": with_spec(stride=[10**15] * 2),
    "strides of another number of dims": with_spec(stride=[1, 1, 1, 1]),
    "another tensor": with_spec(**{"!tensor": "nothing"}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_save_does_not_write_is_skipped(change, tmp_path, caplog):
    newer = two_checkpoints(tmp_path)
    rewritten(newer, change)
    assert load(tmp_path) == [1, 1]
    assert "of step 2 (save 2) is skipped" in caplog.text


@pytest.mark.parametrize(
    "key", ["size", "ranks", "step", "identity", "files", "headers", "common", "differing", "entries"]
)
def test_a_manifest_with_values_of_other_types_is_skipped(key, tmp_path, caplog):
    newer = two_checkpoints(tmp_path)
    rewritten(newer, lambda content: content.update({key: {"ranks": ["../0", 1]}.get(key, ["x"])}))
    assert load(tmp_path) == [1, 1]
    assert "of step 2 (save 2) is skipped" in caplog.text
