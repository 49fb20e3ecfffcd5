"""Buffers equal those of one rank or raise an error; weights computed by hooks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import numbers
from torchmn.errors import MismatchError, ParallelizeError
from torchmn.parallel import full_state_dict, parallelize

SHAPE = (2, 8, 6)


class Centred(nn.Module):
    """Subtracts a running mean of the channels, without batch normalisation."""

    def __init__(self, persistent: bool = True):
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        y = self.out(x - self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


@pytest.mark.guard("buffer_averages")
def test_a_running_mean_of_one_ranks_samples_is_refused_on_all_ranks():
    net = Centred().double()

    def body(comm):
        model = parallelize(net, comm, "datapar")
        with pytest.raises(MismatchError, match=r"in the buffers mean: .* this rank's samples alone"):
            model(numbers((2, *SHAPE), comm.rank))

    torchmn.run_threads(body, 2)


def test_a_buffer_that_is_not_persistent_may_differ_between_ranks():
    net = Centred(persistent=False).double()
    torchmn.run_threads(lambda comm: parallelize(net, comm, "datapar")(numbers((2, *SHAPE), comm.rank)), 2)


@pytest.mark.guard("ShardedBuffers")
def test_a_running_mean_of_cut_channels_is_refused():
    net = Centred().double()

    def body(comm):
        with pytest.raises(ParallelizeError, match="the buffer mean is set to a tensor that is cut"):
            parallelize(net, comm, "modelpar", input_shape=SHAPE)

    torchmn.run_threads(body, 2)


def test_a_running_mean_over_whole_images_on_tiles_equals_one_rank():
    net = Centred().double()
    x = numbers((2, *SHAPE))

    def body(comm):
        grid = torchmn.ProcessGrid(comm, height=2)
        model = parallelize(net, grid, "halopar")
        model(tile_of(x, grid))
        return full_state_dict(model)["mean"]

    means = torchmn.run_threads(body, 2)
    net(x)
    for mean in means:
        assert type(mean) is torch.Tensor
        torch.testing.assert_close(mean, net.mean)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.4)


@pytest.mark.parametrize("computed", [pruned, nn.utils.weight_norm], ids=["pruned", "old weight_norm"])
@pytest.mark.parametrize(
    ("mode", "shape"), [("datapar", SHAPE), ("modelpar", SHAPE), ("modelpar", None), ("halopar", SHAPE)]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_layers_whose_weight_torch_computes_train_as_on_one_rank(mode, shape, computed):
    net = nn.Sequential(
        *(computed(nn.Conv2d(2, 3, 3, padding=1).double()), nn.Tanh(), nn.Flatten()),
        *(computed(nn.Linear(144, 4).double()), nn.Tanh(), nn.Linear(4, 3).double()),
    )
    x, y = numbers((4, *SHAPE)), torch.arange(4) % 3

    def body(comm):
        grid = torchmn.ProcessGrid(comm, **{"data" if mode == "datapar" else "height": 2})
        model = parallelize(net, grid, mode, input_shape=shape)
        optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), grid, model=model)
        mine = x.chunk(2)[comm.rank] if mode == "datapar" else tile_of(x, grid) if mode == "halopar" else x
        labels = y.chunk(2)[comm.rank] if mode == "datapar" else y
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(mine), labels).backward()
            optimizer.step()
        return full_state_dict(model)

    states = torchmn.run_threads(body, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for state in states:
        torch.testing.assert_close(state, net.state_dict())


def test_a_hook_on_a_linear_stays_where_the_shape_is_seen_at_the_first_forward_only():
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(144, 4)).double()
    net[2].register_forward_hook(lambda layer, args, output: output * 2)  # type: ignore[operator]
    x = numbers((4, *SHAPE))
    for output in torchmn.run_threads(lambda comm: parallelize(net, comm, "modelpar")(x).detach(), 2):
        torch.testing.assert_close(output, net(x).detach())
