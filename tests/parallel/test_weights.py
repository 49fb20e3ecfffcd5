"""Files of plain weights load into parallel models: each rank reads its shards, and outputs are those of one rank."""

from __future__ import annotations

import os
from collections import OrderedDict
from math import prod

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchmn
from tests.parallel.test_state import other_model, same_state
from tests.parallel.training import PROBLEMS, tile_of
from tests.sharded.parity import assert_close
from torchmn import ProcessGrid, full_state_dict, load_weights, parallelize
from torchmn.training import weights

PLACES = [
    ("datapar", {"data": 2}),
    ("modelpar", {"width": 3}),
    ("halopar", {"height": 2, "width": 2}),
    ("halopar", {"width": 3}),
    ("halodatapar", {"data": 2, "width": 2}),
]
FORMATS = ["safetensors", "pt", "old pt"]


def write(state, directory, kind="pt"):
    path = directory / f"weights.{kind.split()[-1]}"
    if kind == "safetensors":
        save_file(dict(state), path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "pt")
    return path


def on_ranks(size, body):
    """Returns the message of the error that all ranks raise, which is the same but for the rank."""

    def refused(comm):
        with pytest.raises(torchmn.ArgumentError) as raised:
            body(comm)
        return str(raised.value)

    return torchmn.run_threads(refused, size)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_parallel_model_with_weights_of_a_file_computes_what_one_rank_does(place, kind, tmp_path):
    problem = PROBLEMS["VGG"]
    plain = other_model(problem)
    path = write(plain.state_dict(), tmp_path, kind)
    x, _ = problem.batch(0)
    outputs = plain.eval()(x).detach()
    mode, sizes = place

    def work(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(problem.model(), grid, mode, input_shape=problem.shape)
        assert load_weights(model, path) == ([], [])
        same_state(full_state_dict(model), plain.state_dict())
        return model.eval()(tile_of(x, grid) if mode.startswith("halo") else x).detach()

    for got in torchmn.run_threads(work, prod(sizes.values())):
        assert_close(got, outputs, "output", 1e-10)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plain_model_loads_on_one_rank_and_on_several(kind, tmp_path):
    expected = nn.BatchNorm1d(3).state_dict()
    expected["weight"] = torch.tensor([1.0, 2.0, 3.0])
    path = write(expected, tmp_path, kind)
    alone = nn.BatchNorm1d(3)
    load_weights(alone, path)
    same_state(alone.state_dict(), expected)

    def work(comm):
        model = nn.BatchNorm1d(3)
        load_weights(model, str(path), comm)
        same_state(model.state_dict(), expected)

    torchmn.run_threads(work, 3)


def test_of_a_safetensors_file_a_rank_reads_its_slices_only(tmp_path, monkeypatch):
    path = write(nn.Sequential(nn.Linear(6, 9)).state_dict(), tmp_path, "safetensors")
    opened, whole = weights.safe_open, []

    class Recorded:
        def __init__(self, *args, **kwargs):
            self.file = opened(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            whole.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(weights, "safe_open", Recorded)

    def work(comm):
        model = parallelize(nn.Sequential(nn.Linear(6, 9)), ProcessGrid(comm, width=2), "modelpar", input_shape=(6,))
        load_weights(model, path)

    torchmn.run_threads(work, 2)
    assert not [name for name in whole if name.endswith("weight")]


def test_wrong_names_and_shapes_are_an_error_on_every_rank_and_change_nothing(tmp_path):
    state = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)).state_dict()
    state["1.weight"], state["2.bias"] = torch.zeros(5, 9), state.pop("1.bias")
    path = write(state, tmp_path)
    kept = []

    def body(comm):
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
        model = parallelize(model, ProcessGrid(comm, width=comm.size), "modelpar", input_shape=(6,))
        before = {name: x.clone() for name, x in model.state_dict().items()}
        try:
            load_weights(model, path)
        finally:
            kept.append(all(torch.equal(x, before[name]) for name, x in model.state_dict().items()))

    for text in on_ranks(3, body):
        assert "1.weight: (5, 9) in the file, expected (4, 9)" in text
        assert "1.bias: not in the file" in text and "2.bias: not in the model" in text
        assert "strict=False" in text and "load_weights" in text
    assert kept == [True] * 3


def test_with_strict_off_names_of_one_side_are_left_out_and_returned(tmp_path):
    state = {"0.weight": torch.ones(2, 3), "head.weight": torch.zeros(1)}
    path = write(state, tmp_path)

    def work(comm):
        model = parallelize(nn.Sequential(nn.Linear(3, 2)), ProcessGrid(comm, data=comm.size), "datapar")
        left_out = load_weights(model, path, strict=False)
        assert left_out.missing_keys == ["0.bias"] and left_out.unexpected_keys == ["head.weight"]
        assert model[0].weight.eq(1).all()

    torchmn.run_threads(work, 2)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_file_of_distributed_data_parallel_needs_its_prefix(kind, tmp_path):
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = OrderedDict((f"module.{name}", x) for name, x in plain.state_dict().items())
    path = write(wrapped, tmp_path, kind)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(torchmn.ArgumentError, match=r"pass prefix='module\.'"):
        load_weights(model, path)
    load_weights(model, path, prefix="module.")
    same_state(model.state_dict(), plain.state_dict())


def test_what_is_no_state_dict_is_refused_by_name(tmp_path):
    several = tmp_path / "several.pt"
    torch.save({"model": nn.Linear(2, 1).state_dict(), "epoch": 3}, several)
    code = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 1), code)
    garbage = tmp_path / "x.safetensors"
    garbage.write_bytes(b"no weights")
    for path, words in (
        (several, "several, named model"),
        (code, "weights_only=True"),
        (garbage, "safetensors"),
        (tmp_path / "missing.pt", "No such file"),
        (tmp_path / "missing.safetensors", "missing.safetensors"),
    ):
        for text in on_ranks(2, lambda comm, path=path: load_weights(nn.Linear(2, 1), path, comm)):
            assert words in text and "load_weights" in text and path.name in text


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(torchmn.ArgumentError, match="expected a regular file"):
        load_weights(nn.Linear(2, 2), tmp_path / name)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_in_a_folder_whose_name_is_not_utf_8_are_loaded(kind, tmp_path):
    folder, saved, model = tmp_path / os.fsdecode(b"caf\xe9"), nn.Linear(2, 2), nn.Linear(2, 2)
    folder.mkdir()
    file = write(saved.state_dict(), tmp_path, kind)
    load_weights(model, file.rename(folder / file.name))
    assert torch.equal(model.weight, saved.weight)
    with pytest.raises(torchmn.ArgumentError, match="No such file"):
        load_weights(model, folder / f"missing{file.suffix}")


def test_ranks_whose_files_differ_are_told_apart(tmp_path):
    paths = []
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        paths.append(
            write({"weight": torch.full((2, 2), float(rank == 2)), "bias": torch.zeros(2)}, tmp_path / str(rank))
        )

    def work(comm):
        with pytest.raises(torchmn.MismatchError, match=r"different values of weight: rank 0-1; rank 2"):
            load_weights(nn.Linear(2, 2), paths[comm.rank], comm)

    torchmn.run_threads(work, 3)


def test_tied_weights_that_a_file_has_once_are_complete(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    path = write({"embedding.weight": torch.ones(5, 3)}, tmp_path, "safetensors")
    model = Tied()
    load_weights(model, path)
    assert model.head.weight.eq(1).all()
