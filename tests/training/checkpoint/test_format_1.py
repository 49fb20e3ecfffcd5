"""A checkpoint of format 1, which two ranks have saved, is loaded, and damage to it is found."""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchmn
from torchmn import create_multi_node_checkpointer

FORMAT_1 = Path(__file__).parent / "format_1"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_of_format_1_is_loaded(size):
    def work(comm):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        checkpointer = create_multi_node_checkpointer("run", comm, FORMAT_1)
        from_rank = None if comm.size == 2 else 1
        assert checkpointer.maybe_load(model=model, optimizer=optimizer, from_rank=from_rank) == 7
        expected = torch.arange(24, dtype=torch.float64).view(6, 4) / 7 - 0.05
        torch.testing.assert_close(model[0].weight.detach(), expected, rtol=0, atol=1e-9)
        momentum = optimizer.state[model[0].weight]["exp_avg"]
        torch.testing.assert_close(momentum, torch.full_like(momentum, 0.1))
        extra = checkpointer.extra
        assert extra["mine"].eq(comm.rank if comm.size == 2 else 1).all()
        assert extra["large"].equal(torch.arange(20_000)) and extra["words"] == ("a", 1.5)
        assert extra["half"].equal(torch.ones(3, dtype=torch.complex64))

    torchmn.run_threads(work, size)


def test_a_changed_byte_in_format_1_is_found(tmp_path, caplog):
    name = "run.step-0000000007.save-000001"
    for place in (-1, -100_000):
        copied = tmp_path / str(place) / name
        copied.mkdir(parents=True)
        for file in (FORMAT_1 / name).iterdir():
            (copied / file.name).write_bytes(file.read_bytes())
        data = bytearray((copied / "common.safetensors").read_bytes())
        data[place] ^= 1
        (copied / "common.safetensors").write_bytes(data)
        load = lambda comm: create_multi_node_checkpointer("run", comm, copied.parent).maybe_load()  # noqa: B023, E731
        assert torchmn.run_threads(load, 2) == [None, None]
        assert "common.safetensors: the checksum of" in caplog.text
        caplog.clear()
