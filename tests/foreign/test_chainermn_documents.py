"""What ChainerMN's documentation shows, in its spelling: the tutorial, the model-parallel guide and its examples.

Written after the documentation, with PyTorch's words in place of Chainer's. Results are compared with one process.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn as chainermn
import torchmn.functions
import torchmn.links
from tests._worlds import ranks, run_job
from tests._worlds.data import filled


def digits(count: int = 12) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(0, 3, (count,), generator=draw))


def mlp() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), 0)


# -- tutorial: communicators, optimizers, data sets, evaluators -----------------------------------------------------


@ranks(1, 2, 3)
def test_the_tutorial_s_training_equals_one_process(comm):
    # Step 1: a device by intra_rank, and a multi-node optimizer.
    device = torch.device("cuda", comm.intra_rank) if torch.cuda.is_available() else torch.device("cpu")
    model = mlp().to(device)
    optimizer = chainermn.create_multi_node_optimizer(torch.optim.Adam(model.parameters()), comm)

    # Step 2: the data of worker 0, and a multi-node evaluator.
    if comm.rank == 0:
        train, test = digits(), digits(7)
    else:
        train, test = None, None
    train = chainermn.scatter_dataset(train, comm)
    test = chainermn.scatter_dataset(test, comm)

    class Evaluator:
        def evaluate(self, test_iter):
            ((x, t),) = test_iter
            return {"main/loss": F.cross_entropy(model(x.to(device)), t.to(device)).item()}

    evaluator = Evaluator()
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    for x, t in DataLoader(train, batch_size=2):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), t.to(device)).backward()
        optimizer.step()
    result = evaluator.evaluate(DataLoader(test, batch_size=7))

    serial = mlp()
    adam = torch.optim.Adam(serial.parameters())
    x, t = digits().tensors
    share = 12 // comm.size
    for start in range(0, share, 2):
        rows = torch.cat([torch.arange(start, min(start + 2, share)) + rank * share for rank in range(comm.size)])
        adam.zero_grad()
        F.cross_entropy(serial(x[rows]), t[rows]).backward()
        adam.step()
    for ours, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-6)
    x, t = digits(7).tensors
    assert result == {"main/loss": pytest.approx(F.cross_entropy(serial(x), t).item(), rel=1e-4)}


def test_the_tips_run_under_mpiexec():
    script = """
import multiprocessing
import torchmn as chainermn

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    p = multiprocessing.Process()
    p.start()
    p.join()

    communicator = chainermn.create_communicator("naive")
    chainermn.global_except_hook.add_hook()
    mpi_comm = communicator.mpi_comm
    mpi_comm.Barrier()
    print(mpi_comm.allgather(communicator.rank))
"""
    job = run_job(script, 2)
    assert job.returncode == 0, job.output
    assert job.stdout.count("[0, 1]") == 2


# -- model parallel: communicators, data sets, communication ------------------------------------------------------


@ranks(4, on="threads")
def test_a_communicator_is_split(comm):
    subcomm = comm.split(comm.rank % 2, comm.rank)
    assert (subcomm.size, subcomm.rank) == (2, comm.rank // 2)


@ranks(2, on="threads")
def test_several_processes_share_batches_and_others_have_empty_data_sets(comm):
    train = np.arange(10, dtype=np.float32)
    train_iter = chainermn.iterators.create_multi_node_iterator(DataLoader(train, batch_size=4), comm)
    batches = [train_iter.next().tolist() for _ in range(4)]
    assert comm.allgather_obj(batches) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]] * 2
    empty = chainermn.datasets.create_empty_dataset(train)
    assert len(empty) == 10 and all(empty[place] == () for place in range(10))


@ranks(2, on="threads")
def test_point_to_point_communication_with_a_delegate(comm):
    """Rank 0: f, send, recv, g; the delegate connects f to the rest, as the note on define-by-run explains."""
    f, g, h = filled(nn.Linear(2, 2), 0), filled(nn.Linear(2, 1), 1), filled(nn.Linear(2, 2), 2)
    whole = copy.deepcopy((f, g, h))
    x = torch.ones(3, 2)
    whole[1](whole[2](whole[0](x))).sum().backward()
    if comm.rank == 0:
        phi = chainermn.functions.send(f(x), comm, rank=1)
        y = chainermn.functions.recv(comm, rank=1, delegate_variable=phi)
        g(y).sum().backward()
        torch.testing.assert_close(f.weight.grad, whole[0].weight.grad)
    else:
        y = h(chainermn.functions.recv(comm, rank=0))
        err = chainermn.functions.send(y, comm, rank=0)
        err.backward()
        torch.testing.assert_close(h.weight.grad, whole[2].weight.grad)


@ranks(2, on="threads")
def test_pseudo_connect_joins_two_sends_in_chainermn_s_form(comm):
    x = torch.ones(2, requires_grad=True)
    if comm.rank == 0:
        phi1 = chainermn.functions.send(2 * x, comm, rank=1)
        phi2 = chainermn.functions.send(3 * x, comm, rank=1)
        (phi,) = chainermn.functions.pseudo_connect(phi1, phi2)
        phi.backward()
        assert x.grad.tolist() == [32, 32]
    else:
        first = chainermn.functions.recv(comm, rank=0)
        second = chainermn.functions.recv(comm, rank=0)
        (first * 1).sum().add((second * 10).sum()).backward()


@ranks(3, on="threads")
def test_collective_communication_averages(comm):
    x = torch.full((2,), float(comm.rank), requires_grad=True)
    h = chainermn.functions.allgather(comm, 2 * x)
    h = torch.stack(h).mean(0)
    h.sum().backward()
    assert h.tolist() == [2, 2] and x.grad.tolist() == [2, 2]


# -- model parallel: the four examples -----------------------------------------------------------------------------


class MLP0SubA(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.l1 = nn.LazyLinear(n_out)

    def forward(self, x):
        return F.relu(self.l1(x))


class MLP0SubB(nn.Module):
    def forward(self, y):
        return y


class MLP0(chainermn.MultiNodeChainList):
    def __init__(self, comm, n_out):
        super().__init__(comm=comm)
        self.add_link(MLP0SubA(n_out), rank_in=None, rank_out=1)
        self.add_link(MLP0SubB(), rank_in=1, rank_out=None)


class MLP1Sub(nn.Module):
    def __init__(self, n_units, n_out):
        super().__init__()
        self.l2 = nn.LazyLinear(n_units)
        self.l3 = nn.LazyLinear(n_out)

    def forward(self, h0):
        return self.l3(F.relu(self.l2(h0)))


class MLP1(chainermn.MultiNodeChainList):
    def __init__(self, comm, n_units, n_out):
        super().__init__(comm=comm)
        self.add_link(MLP1Sub(n_units, n_out), rank_in=0, rank_out=0)


@ranks(2)
def test_example_1_a_simple_mlp(comm):
    x, t = digits().tensors
    if comm.rank == 0:
        model, loss = MLP0(comm, 5), lambda y: F.cross_entropy(y, t)
    else:
        model, loss = MLP1(comm, 5, 3), lambda y: y
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(x) if comm.rank == 0 else model())
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] if comm.rank == 0 else losses == [0] * 5


@ranks(2, on="threads")
def test_example_2_an_encoder_and_a_decoder(comm):
    encoder, decoder = filled(nn.LSTM(3, 4), 0), filled(nn.LSTM(3, 4), 1)
    xs = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    whole = copy.deepcopy(encoder), copy.deepcopy(decoder)
    whole[1](xs, whole[0](xs)[1])[0].sum().backward()
    if comm.rank == 0:
        mn_encoder = chainermn.links.create_multi_node_n_step_rnn(encoder, comm, rank_in=None, rank_out=1)
        *_, delegate_variable = mn_encoder(xs)
        delegate_variable.backward()
    else:
        mn_decoder = chainermn.links.create_multi_node_n_step_rnn(decoder, comm, rank_in=0, rank_out=None)
        ys, _, _ = mn_decoder(xs)
        ys.sum().backward()
        assert mn_decoder.actual_rnn is decoder
    own = (encoder, decoder)[comm.rank]
    torch.testing.assert_close(own.weight_ih_l0.grad, whole[comm.rank].weight_ih_l0.grad)


class ParallelConvolution2D(nn.Conv2d):
    """This rank's output channels of a convolution; all ranks get all channels."""

    def __init__(self, comm, in_channels, out_channels, ksize):
        self.comm, self.sizes = comm, [len(part) for part in torch.arange(out_channels).tensor_split(comm.size)]
        super().__init__(in_channels, out_channels, ksize)
        for name in ("weight", "bias"):
            own = getattr(self, name).detach().split(self.sizes)[comm.rank].clone()
            setattr(self, name, nn.Parameter(own))

    def forward(self, x):
        ys = chainermn.functions.allgather(self.comm, super().forward(x))
        return torch.cat(ys, dim=1)


@ranks(1, 2, 3, on="threads")
def test_example_3_a_channel_parallel_convolution_is_the_whole_one(comm):
    whole = filled(nn.Conv2d(2, 5, 3), 0)
    layer = ParallelConvolution2D(comm, 2, 5, 3)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(layer, name).copy_(getattr(whole, name).split(layer.sizes)[comm.rank])
    x = torch.ones(1, 2, 4, 4)
    torch.testing.assert_close(layer(x), whole(x))


class Averaging(nn.Module):
    def __init__(self, comm, block):
        super().__init__()
        self.comm = comm
        self.block = block

    def forward(self, x):
        y = self.block(x)
        if not self.training:
            y = chainermn.functions.allgather(self.comm, y)
            y = torch.stack(y).mean(dim=0)
        return y


@ranks(3, on="threads")
def test_example_4_an_averaging_ensemble(comm):
    block = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        block.weight.fill_(comm.rank)
    model = Averaging(comm, block)
    assert model(torch.ones(1)).item() == comm.rank
    assert model.eval()(torch.ones(1)).item() == pytest.approx(1)


# -- reference: links and extensions ---------------------------------------------------------------------------------


@ranks(1, 2, on="threads")
def test_multi_node_batch_normalization_with_chainermn_s_arguments(comm):
    x = torch.randn(4 * comm.size, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = x[4 * comm.rank : 4 * comm.rank + 4].clone().requires_grad_()
    options = {"initial_gamma": 2.0, "initial_beta": [0.0, 1.0, 2.0], "communication_backend": "mpi"}
    layer = chainermn.links.MultiNodeBatchNormalization(3, comm, decay=0.8, eps=1e-3, dtype=torch.float64, **options)
    whole = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2).double()
    with torch.no_grad():
        whole.weight.fill_(2)
        whole.bias.copy_(torch.arange(3.0))
    torch.testing.assert_close(layer(own), whole(x)[4 * comm.rank : 4 * comm.rank + 4])
    torch.testing.assert_close(layer.avg_var, whole.running_var)
    assert layer.gamma is layer.weight and layer.beta is layer.bias and layer.avg_mean is layer.running_mean
    assert layer(own.flatten(2)[:, :, 0]).shape == (4, 3)
    without = chainermn.links.MultiNodeBatchNormalization(3, comm, use_gamma=False)
    assert without.weight is None and without.bias is not None
    without.double()(own, finetune=True)
    torch.testing.assert_close(without.running_mean, x.mean((0, 2, 3)))
    without.start_finetuning()
    assert without.num_batches_tracked.item() == 0
    half = chainermn.links.MultiNodeBatchNormalization(3, comm, dtype=np.float16)
    assert half.weight.dtype == half.running_mean.dtype == torch.float16
    with pytest.raises(chainermn.ArgumentError, match=r"expected an input of shape \(batch, channel"):
        layer(torch.ones(3, dtype=torch.float64))


@ranks(2, on="threads")
def test_extensions_with_chainermn_s_arguments(comm):
    aggregator = chainermn.extensions.ObservationAggregator(comm, "main/loss", "mean", comm_trigger=(2, "iteration"))
    assert "mean" not in aggregator({"main/loss": 1.0 + comm.rank})
    assert aggregator({"main/loss": 3.0 + comm.rank})["mean"] == 2.5
    with pytest.raises(chainermn.ArgumentError, match=r"comm_trigger .*\(1, 'epoch'\).* call this once per iteration"):
        chainermn.extensions.ObservationAggregator(comm, "main/loss", comm_trigger=(1, "epoch"))
    stop = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        comm, monitor="main/loss", patients=2, max_trigger=(10, "epoch")
    )
    assert [stop({"main/loss": 1.0 + comm.rank}) for _ in range(3)] == [False, False, True]
    with pytest.raises(TypeError, match="both"):
        chainermn.extensions.MultiNodeEarlyStoppingTrigger(comm, patience=1, patients=2)
    batch_norm = nn.BatchNorm1d(1)
    batch_norm.running_mean.fill_(comm.rank)
    chainermn.extensions.AllreducePersistent(batch_norm, comm)()
    assert batch_norm.running_mean.item() == 0.5


@ranks(2, on="threads")
def test_a_checkpointer_with_chainermn_s_arguments(comm, tmp_path, monkeypatch):
    checkpointer = chainermn.create_multi_node_checkpointer(name="example", comm=comm, cp_interval=3, path=tmp_path)
    assert checkpointer.keep == 3
    assert chainermn.create_multi_node_checkpointer("example", comm, 4, 5, tmp_path).keep == 4
