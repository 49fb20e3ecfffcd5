"""The memory of mean gradients: they are written into the gradients, and what a step needs besides is kept."""

from __future__ import annotations

import gc
import sys

import torch

import torchmn
from tests._worlds import ranks
from torchmn.communicators.mean import LARGE_BYTES, Means


@ranks(2, 3, on="threads")
def test_means_are_written_into_the_tensors_and_buffers_serve_again(comm):
    middle = (comm.size - 1) / 2

    def tensors() -> list[torch.Tensor]:
        return [
            torch.full((3, 2), float(comm.rank)),
            torch.full((LARGE_BYTES // 4,), float(comm.rank)),
            torch.full((5, 4), float(comm.rank)).t(),
            torch.full((), 10.0 * comm.rank),
            torch.full((4,), float(comm.rank), requires_grad=True),
            torch.empty(0, 5),
        ]

    expected = [middle, middle, middle, 10 * middle, middle, 0.0]
    means = Means(comm, None, tensors())
    with comm.agreed("means", compared=True):
        first = tensors()
        assert means(first, None) is first
        second = tensors()
        means([x.detach().mul_(2) for x in second], None)
    for mean, doubled, number in zip(first, second, expected, strict=True):
        assert (mean == number).all() and (doubled == 2 * number).all()


@ranks(2, on="threads")
def test_a_step_calls_python_once_per_parameter(comm):
    def calls_of_step(count: int) -> int:
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
        sgd = torch.optim.SGD(parameters, lr=0.1, foreach=True)
        optimizer = torchmn.create_multi_node_optimizer(sgd, comm)
        calls = 0

        def count_call(frame, event, argument):
            nonlocal calls
            calls += event == "call" and "torchmn" in frame.f_code.co_filename

        for step in range(3):  # the first steps plan
            for parameter in parameters:
                parameter.grad = torch.ones(3)
            if step == 2:
                sys.setprofile(count_call)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
        return calls

    assert calls_of_step(300) - calls_of_step(100) < 250  # one each, and a few that depend on waiting


@ranks(2, on="threads")
def test_later_steps_of_many_parameters_set_off_no_garbage_collections(comm):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2000)]
    sgd = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    for _ in range(3):
        comm.barrier()
        gc.collect()
        comm.barrier()
        before = gc.get_stats()[0]["collections"]
        comm.barrier()
        optimizer.step()
        comm.barrier()
        collections = gc.get_stats()[0]["collections"] - before
        comm.barrier()
    assert collections == 0


@ranks(2, on="threads")
def test_gradients_of_new_shapes_and_other_parameters_get_new_buffers(comm):
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(parameters, lr=1.0), comm)
    for shape, has_second in (((2, 3), True), ((3, 2), True), ((3, 2), False), ((7,), True), ((2, 3), True)):
        parameters[0].data = torch.zeros(shape)
        parameters[1].data = torch.zeros(4)
        parameters[0].grad = torch.full(shape, float(comm.rank))
        parameters[1].grad = torch.full((4,), 10.0 * comm.rank) if has_second else None
        optimizer.step()
        assert torch.equal(parameters[0], torch.full(shape, -0.5))
        assert (parameters[1] == (-5.0 if has_second else 0.0)).all()


@ranks(2, on="threads")
def test_gradients_in_one_buffer_are_added_to_and_zeroed_as_any_others(comm):
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), comm, model=model)
    alone = torch.nn.Linear(3, 2, dtype=torch.float64)
    alone.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    batches = torch.linspace(-1, 1, 4 * comm.size * 3, dtype=torch.float64).view(4, comm.size, 3)
    for step, batch in enumerate(batches):
        if step != 2:  # in the third step, gradients add to the means of the second
            optimizer.zero_grad(set_to_none=step == 3)
            plain.zero_grad()
        model(batch[comm.rank]).square().sum().backward()
        (sum(alone(x).square().sum() for x in batch) / comm.size).backward()
        optimizer.step()
        plain.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@ranks(2, 3, on="threads")
def test_a_large_gradient_may_have_another_memory_layout_on_one_rank(comm):
    values = torch.arange(LARGE_BYTES // 4, dtype=torch.float32).view(-1, 512)
    turned = values.t().contiguous().t() if comm.rank == 1 else values.clone()
    after = torch.full_like(values, float(comm.rank))  # messages that meet the wrong ones would show here, too
    given = [turned, after]
    with comm.agreed("means", compared=True):
        found = Means(comm, None, given)(given, None)
    assert found[0] is turned and torch.equal(turned, values)
    assert (found[1] == (comm.size - 1) / 2).all()


@ranks(2, on="threads")
def test_an_expanded_gradient_is_averaged_like_any_other(comm):
    for extent in (5, LARGE_BYTES // 8):
        parameter = torch.nn.Parameter(torch.zeros(extent, dtype=torch.float64))
        optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD([parameter], lr=1.0), comm)
        parameter.grad = torch.tensor(float(comm.rank), dtype=torch.float64).expand(extent)
        optimizer.step()
        assert (parameter == -0.5).all()
