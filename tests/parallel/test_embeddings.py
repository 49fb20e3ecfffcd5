"""Embeddings under modelpar: cut by columns or rows, with the gradients of one rank, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchmn
from tests.sharded.parity import assert_parity
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IDS = torch.tensor([[1, 2, 1], [6, 6, 0], [6, 3, 1], [5, 1, 1]])


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("columns", [1, 5], ids=["by rows", "by columns"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_embeddings_have_the_gradients_of_one_rank(columns, settings, ranks):
    net = nn.Sequential(nn.Embedding(7, columns, **settings), nn.Flatten(), nn.Linear(3 * columns, 4)).double()
    assert_parity(net, IDS.shape, {"width": ranks}, mode="modelpar", x=IDS)


def test_ids_that_do_not_exist_are_an_error_and_no_zeros():
    net = nn.Sequential(nn.Embedding(7, 1))

    def body(comm):
        model = parallelize(net, comm, "modelpar", input_shape=(3,))
        for ids in ([[1, 7, 2]], [[-1, 0, 0]]):
            with pytest.raises(ParallelizeError, match=r"expected ids in 0\.\.6, got"):
                model(torch.tensor(ids))

    torchmn.run_threads(body, 2, timeout=30)


@pytest.mark.guard("batch_dependent_embeddings")
@pytest.mark.parametrize("settings", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_embeddings_that_depend_on_the_whole_batch_are_refused_along_data(settings):
    def body(comm):
        with pytest.raises(ParallelizeError, match=r"0 \(Embedding\): .* depends on the ids of the whole batch"):
            parallelize(nn.Sequential(nn.Embedding(7, 4, **settings)), comm, "datapar")

    torchmn.run_threads(body, 2, timeout=30)
