"""A component that raises, and a result of a chain that backward forgot: errors that name the place."""

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from torchmn.errors import ComponentError, DelegateError, GraphError
from torchmn.functions import edges_of
from torchmn.graph import MultiNodeChainList


class Joined(nn.Module):
    def forward(self, pair, x):
        return pair["a"] + x


def test_a_layer_of_the_wrong_size_is_named_with_its_rank_its_shapes_and_where_they_came_from():
    def body(comm):
        chain = MultiNodeChainList(comm)
        if comm.rank == 0:
            chain.add_link(nn.Linear(4, 6), None, 1)
        else:
            chain.add_link(nn.Tanh(), 0, 1)
            chain.add_link(nn.Linear(5, 2), 1, None)
        chain(torch.ones(3, 4)).sum().backward()

    with pytest.raises(
        ComponentError, match=r"rank 1 of 2: component 1 \(Linear\) raised RuntimeError: mat1"
    ) as caught:
        torchmn.run_threads(body, 2)
    text = "called with 1 argument: a torch.float32 tensor of shape (3, 6) from rank 1's component 0 (Tanh)."
    assert text in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # `except RuntimeError` still works
    assert type(caught.value.__cause__) is RuntimeError


def test_several_arguments_are_told_each_with_every_shape_in_it():
    def body(comm):
        chain = MultiNodeChainList(comm)
        if comm.rank == 0:
            chain.add_link(Returns({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.int64)}), None, 1)
        else:
            chain.add_link(Returns(torch.ones(3)), None, 1)
            chain.add_link(Joined(), [0, 1], None)
        chain()

    with pytest.raises(ComponentError, match=r"rank 1 of 2: component 1 \(Joined\)") as caught:
        torchmn.run_threads(body, 2)
    first = (
        "2 arguments: a dict with a torch.float32 tensor of shape (2,), a torch.int64 tensor of shape (1,) from rank 0"
    )
    assert first in str(caught.value)
    assert "; a torch.float32 tensor of shape (3,) from rank 1's component 0 (Returns)" in str(caught.value)


@ranks(1, on="solo")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_input_that_was_not_passed(comm, microbatches):
    chain = MultiNodeChainList(comm, microbatches)
    chain.add_link(nn.Linear(4, 6))
    with pytest.raises(ComponentError, match=r"raised TypeError: .*missing 1 required positional argument") as caught:
        chain()
    assert "Pass the model's input on this rank, or add it with the rank_in" in str(caught.value)
    with pytest.raises(ComponentError, match=r"shape \(\d, 5\) from the call of the chain on this rank"):
        chain(torch.ones(2, 5))


class Own(Exception):
    pass


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, *_):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@ranks(1, on="solo")
def test_exceptions_of_other_classes_than_pythons_stay_what_they_are(comm):
    for error in (Own("mine"), torch.OutOfMemoryError("full"), GraphError("an inner chain")):
        chain = MultiNodeChainList(comm)
        chain.add_link(Returns(error))
        with pytest.raises(type(error)) as caught:
            chain()
        assert caught.value is error


@ranks(2, on="threads")
def test_a_result_that_backward_forgot_is_told_in_the_words_of_the_chain(comm):
    chain = MultiNodeChainList(comm)
    chain.add_link(nn.Linear(2, 2), *((None, 1) if comm.rank == 0 else (0, None)))
    result = chain(torch.ones(1, 2))
    if comm.rank == 1:
        result.sum().backward()
        comm.barrier()
        return
    del result
    comm.barrier()
    with pytest.raises(DelegateError) as caught:
        edges_of(chain.comm).poll()
    text = str(caught.value)
    assert "rank 0 of 2: backward did not visit what rank 0's component 0 (Linear) sent to rank 1's component 0" in text
    assert text.count("of the chain at ") == text.count("test_failures.py:") == 2
    assert "on the delegate that a rank without output gets" in text
    assert "recv" not in text and "tag" not in text and "pseudo_connect" not in text


@ranks(2)
@pytest.mark.parametrize("columns", [1, 300_000])  # sent with their header, and by other ways
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("microbatches", "edges"), [(2, 1), (1, 2)])
def test_what_a_failed_call_did_not_receive_is_not_taken_for_values_of_the_next_and_keeps_nobody_waiting(
    comm, microbatches, edges, grad, columns
):
    class Fragile(nn.Module):
        broken = True

        def forward(self, x):
            if self.broken:
                raise MemoryError("no room for this batch")
            return x

    with comm.split(0, comm.rank) as own, torch.set_grad_enabled(grad):
        chain, fragile = MultiNodeChainList(own, microbatches), Fragile()
        for _ in range(edges):
            chain.add_link(*((nn.Identity(), None, 1) if comm.rank == 0 else (fragile, 0, None)))
        if comm.rank == 0:
            chain(torch.full((2, columns), 1.0, requires_grad=grad))
        else:
            with pytest.raises(ComponentError, match="no room"):  # and the user continues with the next batch
                chain()
        fragile.broken = False
        for value in (2.0, 3.0):
            outputs = chain(torch.full((2, columns), value, requires_grad=grad))
            if comm.rank == 1:
                for y in outputs if edges > 1 else (outputs,):
                    assert torch.equal(y, torch.full((2, columns), value))
        del outputs
    # Here the communicator was finalized: it waits until everything that was sent has been received and answered.


@ranks(1, 2, on="threads")
def test_a_chain_without_any_component_is_an_error(comm):
    chain = MultiNodeChainList(comm)
    with pytest.raises(GraphError, match="it has no component on any rank: add some with add_link"):
        chain(torch.ones(1, 2))
    chain.add_link(nn.Identity(), None, None)
    assert chain(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
