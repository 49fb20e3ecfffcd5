"""The memory of mean gradients: small ones are views of one buffer, others stay in place."""

from __future__ import annotations

import torch

import torchmn
from tests._worlds import ranks
from torchmn.communicators.mean import LARGE_BYTES, means


@ranks(2, 3, on="threads")
def test_means_of_small_gradients_are_views_of_one_buffer_and_others_stay_in_place(comm):
    middle = (comm.size - 1) / 2
    small = [torch.full((3, 2), float(comm.rank)), torch.full((), 10.0 * comm.rank), torch.empty(0, 5)]
    large = torch.full((LARGE_BYTES // 4,), float(comm.rank))
    turned = torch.full((5, 4), float(comm.rank)).t()
    in_graph = torch.full((4,), float(comm.rank), requires_grad=True)
    with comm.agreed("means", compared=True):
        found = means(comm, [small[0], large, turned, small[1], in_graph, small[2]], None, None)
    expected = [middle, middle, middle, 10 * middle, middle, 0.0]
    for mean, number in zip(found, expected, strict=True):
        assert (mean == number).all()
    assert found[1] is large and found[2] is turned and found[4] is in_graph
    assert found[0].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr()
    assert found[5].shape == (0, 5)
    assert (small[0] == comm.rank).all()  # a small one is not written to


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
    with comm.agreed("means", compared=True):
        found = means(comm, [turned, after], None, None)
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
