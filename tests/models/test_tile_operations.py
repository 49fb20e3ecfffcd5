"""A stack on tiles: tile_features against separate functions, and OverlapAdd with one exchange."""

import pytest
import torch
from torch.testing import assert_close

from tests._worlds import ranks
from tests._worlds.data import numbers, tensor
from tests.models.small import small_model
from torchmn import ProcessGrid
from torchmn.functions import halo_exchange, halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Window
from torchmn.models.sparse_autoencoder import tiles
from torchmn.models.sparse_autoencoder.gradients import OverlapAdd, _overlap_plan
from torchmn.models.sparse_autoencoder.overlapped_outputs import owned_rows, sent_and_other_rows
from torchmn.models.sparse_autoencoder.tile_features import in_steps, tile_features
from torchmn.nn.local_filters.batch_last import from_pixels, over_all_dims
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.parallel import parallelize

PARTS = {4: (2, 2), 3: (3, 1), 2: (2, 1)}


@ranks(2, 3, 4, on="threads")
@pytest.mark.parametrize("is_upright", [True, False])
def test_features_as_one_operation_equal_those_step_by_step(comm, is_upright):
    height, width = PARTS[comm.size] if is_upright else PARTS[comm.size][::-1]
    grid = ProcessGrid(comm, height=height, width=width)
    model = parallelize(small_model(in_size=(14, 13)), grid, "halopar")
    stack, above = model.stacks  # type: ignore[misc]
    filters = tiles.filters_of(stack)
    dims = tiles.filters_of(above).array.plan.dims
    steps = tiles._steps(stack, (dims[0].needed, dims[1].needed))
    size = filters.array.plan.buffer_shape
    x = from_pixels(tensor(numbers((*size, 1, 3), comm.rank))).requires_grad_()
    field_grid = FieldGrid((size[0], size[1]), filters.kernel, filters.stride)
    found = []
    for features in (tile_features, in_steps):
        y = features(x, filters.weight, field_grid, 0.1, steps, grid.tiles)
        first = torch.autograd.grad(y.square().sum(), (x, filters.weight), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, filters.weight))
        without_graph = torch.autograd.grad(
            features(x, filters.weight, field_grid, 0.1, steps, grid.tiles).square().sum(), (x, filters.weight)
        )
        found.append((y, *first, *second, *without_graph))
    assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)
    if (height, width) == (2, 1):
        assert owned_rows(steps.plan) is not None
        sent, not_sent = sent_and_other_rows(steps.plan)
        assert sent
        assert not_sent  # which are computed while those travel
    if width > 1:
        assert owned_rows(steps.plan) is None


@ranks(2, 3, 4, on="threads")
@pytest.mark.parametrize(("kernel", "is_one_exchange"), [(3, True), (7, False)], ids=["neighbours", "further ranks"])
def test_shares_of_pixels_are_summed_wherever_they_lie(comm, kernel, is_one_exchange):
    parts = {4: (2, 2), 3: (3, 1), 2: (1, 2)}[comm.size]
    dims = tuple(DimPlan.of_window(n, p, Window(kernel, 1)) for n, p in zip((10, 9), parts, strict=True))
    plan = HaloPlan.of(dims, (comm.rank // parts[1], comm.rank % parts[1]))
    assert (_overlap_plan(plan) is not None) == (is_one_exchange or comm.size != 3)
    share = tensor(numbers((*plan.buffer_shape, 2, 3), comm.rank))
    every = over_all_dims(plan, 2, 3)
    expected = halo_exchange(halo_scatter_add(share, every, comm), every, comm)
    assert_close(OverlapAdd(share.clone(), plan, comm).sum_(), expected, rtol=1e-12, atol=1e-12)
