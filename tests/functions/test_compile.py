"""torch.compile of programs that communicate: communication is not compiled, and the numbers are the same."""

import pytest
import torch

from tests._worlds import ranks
from tests.functions.serial import leaf
from torchmn import functions as F
from torchmn.compile_boundary import uncompiled


def through_collectives(comm, x, weight):
    hidden = torch.tanh(x @ weight)
    parts = F.scatter(comm, [hidden * (rank + 1) for rank in range(comm.size)])
    inputs_by_rank = F.allgather(comm, parts * hidden)
    rows = comm.allgather_obj(len(x))  # as a metric would be
    return F.allreduce(comm, sum(inputs_by_rank)).square().sum() * (comm.rank + 1) / sum(rows)


def through_a_ring(comm, x, weight):
    hidden = torch.tanh(x @ weight)
    sent = F.send(hidden, comm, (comm.rank + 1) % comm.size)
    return F.recv(comm, (comm.rank - 1) % comm.size, delegate_variable=sent).square().sum() + hidden.sum()


def through_a_joined_ring(comm, x, weight):
    hidden = torch.tanh(x @ weight)
    sent = F.send(hidden, comm, (comm.rank + 1) % comm.size)
    received = F.recv(comm, (comm.rank - 1) % comm.size)
    return F.pseudo_connect(sent, received * 2).square().sum() + hidden.sum()


def steps(comm, function):
    """Values and gradients of a few calls, with batches of other sizes: these make torch.compile recompile."""
    found = []
    for rows in (2, 3, 5, 2):
        x, weight = leaf(rows, 4, seed=rows + comm.rank), leaf(4, 3, seed=comm.rank)
        value = function(comm, x, weight)
        value.backward()
        found += [value.detach(), x.grad, weight.grad]
    return found


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch.compile of torch 2.6 fails if two threads compile at a time"
)
@pytest.mark.parametrize("function", [through_collectives, through_a_ring, through_a_joined_ring])
@ranks(2, on="threads")
def test_a_compiled_program_that_communicates_has_the_numbers_of_the_plain_one(comm, function):
    expected = steps(comm, function)
    compiled = torch.compile(function, backend="aot_eager")
    torch.testing.assert_close(steps(comm, compiled), expected)


def test_what_is_uncompiled_is_called_as_it_is_with_all_that_it_calls():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def inner(x):
        return x.sin()

    @uncompiled
    def middle(x):
        return inner(x) * 2

    compiled = torch.compile(lambda x: middle(x + 1) - 3, backend=backend)
    x = torch.arange(3.0)
    torch.testing.assert_close(compiled(x), (x + 1).sin() * 2 - 3)
    assert not any(node.target == "sin" for graph in graphs for node in graph.graph.nodes)
    assert graphs  # around it, it was compiled
