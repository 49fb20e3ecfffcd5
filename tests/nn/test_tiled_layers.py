"""Local filters and the layers around them on tiles: outputs and all gradients equal those of one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from tests._worlds import ranks
from tests.sharded.parity import assert_parity
from torchmn import ProcessGrid
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.geometry import all_owned
from torchmn.nn import CrossMapPool, CrossMapResponseNorm, L2Pool2d, LocalContrastNorm2d, LocalFilter2d
from torchmn.parallel import full_state_dict, parallelize
from torchmn.sharded import Samples, image_layout, shard_of, whole

GRIDS = [(1, 1), (1, 2), (2, 2), (3, 2)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))

# kernel, stride, in_size, padding
FILTERS = {
    "3 x 3": (3, 1, (11, 9), 0),
    "non-square, overlapping stride, padded": ((2, 4), (2, 1), (9, 10), (1, 2)),
    "strides that leave pixels out": (2, (3, 4), (13, 14), 0),
    "wide kernel": ((7, 6), 1, (12, 11), 3),
    "fewer outputs than ranks": ((5, 4), 1, (6, 5), 0),
}
every_filter = pytest.mark.parametrize(("kernel", "stride", "size", "padding"), FILTERS.values(), ids=FILTERS)


@every_grid
@every_filter
def test_local_filters(grid, kernel, stride, size, padding):
    # A layer before it, so that the gradient of its input crosses ranks too.
    net = nn.Sequential(nn.Conv2d(2, 2, 1), LocalFilter2d(2, 3, kernel, stride, size, bias=True, padding=padding))
    assert_parity(net, (2, 2, *size), grid)


def test_ranks_without_filters_and_a_decoder_that_is_not_used():
    layer = LocalFilter2d(3, 3, (2, 3), (2, 3), (3, 11), bias=True, padding=(1, 2), tied=False)
    assert_parity(nn.Sequential(layer), (2, 3, 3, 11), (3, 3))


@ranks(2, on="threads")
def test_a_single_layer_cannot_be_made_parallel(comm):
    with pytest.raises(ParallelizeError, match=r"Put it into one: nn\.Sequential\(layer\)"):
        parallelize(LocalFilter2d(1, 2, 3, 1, 8), ProcessGrid(comm, width=2), "halopar")


@pytest.mark.parametrize(
    "layer",
    [
        LocalFilter2d(4, 3, 3, 1, (6, 5)),
        L2Pool2d(3, 1),
        LocalContrastNorm2d(3, 4),
        LocalContrastNorm2d(3, 4, "response"),
        CrossMapPool(4, 2),
        CrossMapResponseNorm(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_after_maps_that_are_cut(layer):
    assert_parity(nn.Sequential(nn.Conv2d(2, 4, 3), layer), (2, 2, 8, 7), {"width": 2}, mode="modelpar")


LAYERS = {
    "l2 pool": L2Pool2d(3, 1),
    "l2 pool, strided and padded": L2Pool2d((3, 2), (2, 1), 0.1, padding=1),
    "subtractive-divisive": LocalContrastNorm2d(3, 2),
    "subtractive-divisive, wide": LocalContrastNorm2d((7, 5), 2),
    "response": LocalContrastNorm2d((3, 5), 2, "response"),
    "response, even window": LocalContrastNorm2d((2, 4), 2, "response"),
    "cross-map response": CrossMapResponseNorm(3, alpha=0.5),
    "cross-map pool": CrossMapPool(2, 3),
    "average pool": nn.AvgPool2d(3, 2, 1),
}


@every_grid
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_other_layers(grid, layer):
    assert_parity(nn.Sequential(nn.Conv2d(2, 2, 1), layer), (2, 2, 11, 10), grid)


def test_windows_of_zeros_are_zeros_on_every_rank():
    x = torch.zeros(2, 2, 12, 12, dtype=torch.float64)
    x[:, :, 1:4, 2:7] = torch.rand(2, 2, 3, 5, dtype=torch.float64)
    net = nn.Sequential(L2Pool2d(3, 1), LocalContrastNorm2d(3, 2, dtype=torch.float64))
    assert_parity(net, x.shape, (2, 2), x=x)


def filled(net: nn.Module, seed: int) -> nn.Module:
    """`net` with random parameters, the same on every rank, also where ranks are threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return net


class Autoencoder(nn.Module):
    """Encode and decode."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, 2, 1)
        self.filter = LocalFilter2d(2, 3, **options)

    def forward(self, x):
        return self.filter.transpose(self.filter(self.before(x)))


@every_grid
@every_filter
def test_decoded_overlaps_reach_their_owners(grid, kernel, stride, size, padding):
    net = Autoencoder(kernel=kernel, stride=stride, in_size=size, padding=padding, tied=False)
    nn.init.normal_(net.filter.decoder_weight)
    assert_parity(net, (2, 2, *size), grid)


extents = st.integers(3, 12)
kernels = st.integers(1, 5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.tuples(extents, extents), st.tuples(kernels, kernels), st.tuples(kernels, kernels), st.data())
def test_any_filter_on_any_image_and_grid(size, kernel, stride, data):
    padding = tuple(data.draw(st.integers(max(0, (k - n + 1) // 2), k)) for n, k in zip(size, kernel, strict=True))
    grid = data.draw(st.sampled_from(GRIDS))
    net = Autoencoder(kernel=kernel, stride=stride, in_size=size, padding=padding)
    assert_parity(net, (2, 2, *size), grid)


@ranks(6, on="threads")
def test_each_rank_holds_only_the_filters_of_its_own_outputs(comm):
    net = filled(nn.Sequential(LocalFilter2d(1, 2, 3, 1, (9, 10), bias=True, tied=False)), 1)
    grid = ProcessGrid(comm, height=3, width=2)
    parallel = parallelize(net, grid, "halopar")
    rows, columns = all_owned(7, 3)[comm.rank // 2], all_owned(8, 2)[comm.rank % 2]
    mine = dict(parallel.named_parameters())
    assert set(mine) == set(dict(net.named_parameters()))
    for name, parameter in net.named_parameters():
        assert torch.equal(mine[name], parameter[rows.as_slice(), columns.as_slice()])
        assert mine[name].untyped_storage().nbytes() == mine[name].numel() * mine[name].element_size()
    total = comm.allreduce(torch.tensor(sum(p.numel() for p in mine.values())))
    assert total == sum(p.numel() for p in net.parameters())


@ranks(4, on="threads")
def test_global_state_goes_out_and_in_again(comm):
    net = filled(nn.Sequential(LocalFilter2d(1, 2, (3, 2), 1, (9, 7), bias=True)), 2)
    parallel = parallelize(net, ProcessGrid(comm, height=2, width=2), "halopar")
    for name, value in full_state_dict(parallel).items():
        assert torch.equal(value, net.state_dict()[name])
    other = filled(nn.Sequential(LocalFilter2d(1, 2, (3, 2), 1, (9, 7), bias=True)), 3)
    parallel.load_state_dict(other.state_dict())
    for name, value in full_state_dict(parallel).items():
        assert torch.equal(value, other.state_dict()[name])
    again = parallelize(net, ProcessGrid(comm, height=1, width=4), "halopar")
    again.load_state_dict(full_state_dict(parallel))
    assert torch.equal(full_state_dict(again)["0.weight"], other[0].weight)


@ranks(2, on="threads")
def test_unit_norm_needs_no_other_rank(comm):
    net = nn.Sequential(LocalFilter2d(1, 2, 3, 1, 8))
    parallel = parallelize(net, ProcessGrid(comm, width=2), "halopar")
    with torch.no_grad():
        parallel[0].weight.mul_(3 + comm.rank)
    if comm.rank == 0:
        parallel[0].unit_norm_()
    norms = parallel[0].weight.detach().flatten(3).norm(dim=3)
    assert_close(norms, torch.full_like(norms, 1.0 if comm.rank == 0 else 4.0))


@ranks(2, on="threads")
def test_whole_images_on_sliced_filters_are_refused(comm):
    layer = LocalFilter2d(1, 2, 3, 1, 8)
    grid = ProcessGrid(comm, width=2)
    tiled = layer.slice_over(grid)
    with pytest.raises(ParallelizeError, match="holds the filters of one tile: expected a ShardedTensor, got a whole"):
        tiled(torch.zeros(2, 1, 8, 8))
    parallel = parallelize(nn.Sequential(layer), grid, "halopar")
    with pytest.raises(ArgumentError, match=r"got \(2, 1, 8, 16\).*whole images.*input_shape=\(1, 8, 8\)"):
        parallel(torch.zeros(2, 1, 8, 8))
    assert "(6, 3) of (6, 6) positions here" in repr(tiled)


@ranks(2, on=["mpi", "gloo"])
def test_across_processes_too(comm):
    layer = filled(LocalFilter2d(2, 3, 3, 1, (9, 8), padding=1, dtype=torch.float64), 4)
    grid = ProcessGrid(comm, height=2)
    x = torch.arange(2.0 * 2 * 9 * 8, dtype=torch.float64).sin().view(2, 2, 9, 8)
    tiled = layer.slice_over(grid)
    decoded = whole(tiled.transpose(tiled(shard_of(x, image_layout(grid, tuple(x.shape), Samples(0, 2))))))
    assert_close(decoded, layer.transpose(layer(x)))
