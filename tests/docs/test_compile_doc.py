"""docs/compile.md: its table is that of graphs that torch.compile makes; results are those without it."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest
import torch
from torch import nn

import torchmn
from tests.docs.pages import (
    assert_contents_are_the_sections,
    assert_public_names_and_links_exist,
    page,
    run_snippets,
)
from torchmn import functions as F

PAGE = page("compile.md")
ROWS = dict(re.findall(r"^\| (.*?) \| (all|some|none) \|", PAGE, re.MULTILINE))
GRIDS = {
    "datapar": {"data": 2},
    "modelpar": {"height": 2},
    "halopar": {"height": 2},
    "halodatapar": {"data": 2},
}


class Backend:
    """A compiler that changes nothing, and counts the operations of each graph."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, _):
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


# Threads share torch's random state, so ranks copy these.
NET = nn.Sequential(
    *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))
).double()


class Steps(nn.Module):
    """The same without a loop, in which the compiler cannot continue after what it does not trace."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = net()[:1], net()[1], net()[2:]

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


LSTM = nn.LSTM(8, 4).double()


def net():
    return deepcopy(NET)


def model_of(row, comm, compiled):
    """The model of a row, whose components `compiled` compiles."""
    if row.startswith("a plain model"):
        model = net()
        torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
        return model
    if "create_mnbn_model" in row:
        return torchmn.create_mnbn_model(Steps(), comm)
    if "torchmn.functions" in row:
        layer = net()[0]
        return lambda x: F.allreduce(comm, layer(x).relu()).square()
    if "MultiNodeChainList" in row:
        chain = torchmn.MultiNodeChainList(comm)
        component = net()[:2] if comm.rank == 0 else net()[2:]
        component = compiled(component) if "compiled components" in row else component
        ends = {"rank_in": None, "rank_out": 1} if comm.rank == 0 else {"rank_in": 0, "rank_out": None}
        chain.add_link(component, **ends)
        return chain
    if "n_step_rnn" in row:
        ends = {"rank_out": 1} if comm.rank == 0 else {"rank_in": 0}
        return torchmn.nn.create_multi_node_n_step_rnn(deepcopy(LSTM), comm, **ends)
    mode = re.search(r'"(\w+)"', row)[1]
    grid = torchmn.ProcessGrid(comm, **GRIDS[mode])
    return torchmn.parallelize(net(), grid, mode, input_shape=(1, 8, 8))


def tensors(result):
    """The tensors in nested tuples."""
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    return [result] if isinstance(result, torch.Tensor) else []


@pytest.mark.parametrize("row", ROWS)
def test_a_model_is_compiled_as_far_as_the_table_shows_and_has_the_same_results(row):
    torch._dynamo.reset()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64) if "n_step_rnn" not in row else torch.randn(5, 2, 8).double()

    def run(comm, compiles):
        backend = Backend()
        model = model_of(row, comm, lambda part: torch.compile(part, backend=backend) if compiles else part)
        whole = compiles and "compiled components" not in row
        called = torch.compile(model, backend=backend) if whole else model
        results = tensors(called(x))
        sum(each.sum() for each in results if each.requires_grad).backward()
        return [each.detach() for each in results], backend.graphs

    plain = torchmn.run_threads(lambda comm: run(comm, False), 2)
    compiled = torchmn.run_threads(lambda comm: run(comm, True), 2)
    torch.testing.assert_close([results for results, _ in compiled], [results for results, _ in plain])
    for _, graphs in compiled:
        # All: one graph. Some: graphs before and after what is not compiled. None: no operation in any graph.
        as_shown = {"all": len(graphs) == 1, "some": len(graphs) > 1, "none": not sum(graphs)}
        assert as_shown[ROWS[row]], graphs
        assert ROWS[row] == "none" or min(graphs) > 0, graphs


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_block_runs_as_printed(n, transport, tmp_path):
    job = run_snippets(PAGE, n, transport, tmp_path)
    assert "torch.compile(parallelize(...)) works" in job.stdout


def test_contents_names_and_links():
    assert len(ROWS) == 10
    assert_contents_are_the_sections(PAGE)
    assert_public_names_and_links_exist(PAGE)
