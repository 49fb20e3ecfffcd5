"""Tensors that are not plain memory, on one rank: right numbers, or an error on every rank. Never a crash."""

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused

VALUES = torch.arange(1.0, 7.0).reshape(2, 3)


class Wrapper(Tensor):
    """A tensor that only represents another one."""

    @staticmethod
    def __new__(cls, shape):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing may be computed with it: it is refused first")


def freed() -> Tensor:
    x = VALUES.clone()
    x.untyped_storage().resize_(0)
    return x


def without_memory() -> list[Tensor]:
    return [freed(), Wrapper((2, 3)), nn.UninitializedParameter()]


def made_under_inference_mode() -> Tensor:
    with torch.inference_mode():
        return VALUES.clone()


@ranks(2)
def test_zeros_without_memory_travel_as_zeros(comm):
    zeros = torch._efficientzerotensor(2, 3)
    x = zeros if comm.rank == 0 else VALUES
    assert comm.allreduce(x).equal(VALUES)
    assert comm.allreduce(x).equal(VALUES)  # the second time by a shorter way
    assert comm.bcast(x).add(1).equal(torch.ones(2, 3))
    assert [part.add(1).tolist() for part in comm.allgather(x)] == [[[1.0] * 3] * 2, VALUES.add(1).tolist()]
    comm.send(x, 1 - comm.rank)
    assert comm.recv(1 - comm.rank).equal(VALUES if comm.rank == 0 else torch.zeros(2, 3))


@ranks(2)
def test_a_tensor_without_memory_is_refused_on_every_rank(comm):
    comm.allreduce(VALUES)  # what is like it afterwards goes a shorter way
    for odd in without_memory():
        x = odd if comm.rank == 1 else VALUES
        word = "lazy" if isinstance(odd, nn.UninitializedParameter) else "memory"
        assert_refused(comm, lambda x=x: comm.allreduce(x), "rank 1", "allreduce", word)
        assert_refused(comm, lambda x=x: comm.alltoall([x, x]), "rank 1", "alltoall", word)
        assert_refused(comm, lambda x=x: comm.bcast(x, 1), "rank 1", "bcast", word)
        if comm.rank == 1:
            with pytest.raises(torchmn.ArgumentError, match=word):
                comm.send(x, 0)
        else:
            with pytest.raises(torchmn.PeerError, match=word):
                comm.recv(1)


@ranks(2)
def test_inside_of_vmap_nothing_is_sent(comm):
    comm.allreduce(torch.ones(3))
    call = torch.vmap(comm.allreduce) if comm.rank == 1 else comm.allreduce
    x = VALUES if comm.rank == 1 else torch.ones(3)
    assert_refused(comm, lambda: call(x), "rank 1", "torch.func")


@ranks(2, on=("mpi", "gloo"))  # threads would share torch's one level of dual numbers
def test_a_forward_mode_tangent_is_not_lost_in_silence(comm):
    comm.allreduce(VALUES)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(VALUES, VALUES) if comm.rank == 1 else VALUES
        assert_refused(comm, lambda: comm.allreduce(x), "rank 1", "tangent")
        assert_refused(comm, lambda: torchmn.functions.allreduce(comm, x), "rank 1", "tangent")
        if comm.rank == 1:
            with pytest.raises(torchmn.ArgumentError, match="tangent"):
                torchmn.functions.send(x, comm, 0)
        else:
            with pytest.raises(torchmn.PeerError, match="tangent"):
                torchmn.functions.recv(comm, 1)


@ranks(2)
def test_a_tensor_that_cannot_be_overwritten_is_refused_on_every_rank(comm):
    shared = torch.arange(4.0).as_strided((2, 3), (1, 1))
    for odd in (torch.ones(3).expand(2, 3), shared, torch._efficientzerotensor(2, 3), made_under_inference_mode()):
        comm.allreduce(VALUES)
        x = odd if comm.rank == 1 else VALUES.clone()
        assert_refused(comm, lambda x=x: comm.allreduce(x, in_place=True), "rank 1", "overwrite", "x.clone()")
        assert comm.allreduce(x).equal(VALUES + odd)


@ranks(1)
def test_slices_and_transposed_tensors_are_written_in_place_and_overlapping_ones_refused(comm):
    x = torch.zeros(4, 6, 8)
    plain = [x, x[::2, 1:, ::3], x.transpose(0, 2), x[:, None], x[0, 0, 0], x[:0], x.permute(1, 2, 0)[::2], x[..., :1]]
    for writable in plain:
        assert comm.allreduce(writable, in_place=True) is writable
    for overlapping in (x[:1].expand(4, 6, 8), x.unfold(0, 3, 1), torch.zeros(9).as_strided((3, 3), (2, 1))):
        with pytest.raises(torchmn.ArgumentError, match="share memory"):
            comm.allreduce(overlapping, in_place=True)


@ranks(2)
def test_models_with_a_buffer_that_cannot_be_received_are_refused_on_every_rank(comm):
    for odd in (VALUES.to_sparse(), VALUES.to("meta"), torch.ones(3).expand(2, 3)):
        model = nn.Linear(1, 1)
        model.register_buffer("mask", odd if comm.rank == 1 else VALUES)
        assert_refused(comm, lambda model=model: comm.bcast_data(model), "rank 1", "bcast_data", "mask", "expected")


@ranks(2)
def test_gradients_that_cannot_be_overwritten_are_refused_on_every_rank(comm):
    model = nn.Linear(3, 2, bias=False)
    model.weight.grad = torch.ones(3).expand(2, 3) if comm.rank == 1 else VALUES
    assert_refused(comm, lambda: comm.multi_node_mean_grad(model), "rank 1", "weight", "overwrite")


@ranks(2)
def test_quantized_tensors_travel_as_objects(comm):
    x = torch.quantize_per_tensor(VALUES, 0.5, 0, torch.quint8)
    assert pickle.loads(pickle.dumps(x)).dequantize().equal(VALUES)
    for each in comm.allgather_obj(x):
        assert each.dequantize().equal(VALUES)


@ranks(2)
def test_what_was_first_used_under_inference_mode_works_outside_of_it(comm):
    sizes = (3, 40_000, 300_000)
    with torch.inference_mode():
        comms = [comm, comm.split(0)]
        for each in comms:
            for size in sizes:
                assert each.allreduce(torch.ones(size)).eq(2).all()
    for each in comms:
        for size in sizes * 3:
            assert each.allreduce(torch.ones(size)).eq(2).all()
            assert each.allreduce(torch.ones(size), in_place=True).eq(2).all()
        assert each.bcast(torch.full((700,), float(each.rank)), 1).eq(1).all()


@ranks(2)
def test_what_a_rank_sends_under_inference_mode_may_be_part_of_the_others_graph(comm):
    if comm.rank == 0:
        with torch.inference_mode():
            comm.send(VALUES, 1)
    else:
        w = torch.ones(2, 3, requires_grad=True)
        (w * comm.recv(0)).sum().backward()
        assert w.grad is not None and w.grad.equal(VALUES)


@ranks(2)
def test_a_default_device_of_the_user_is_not_that_of_messages(comm):
    x = VALUES.clone()
    big = torch.ones(300_000)
    with torch.device("meta"):  # as "cuda", which many users set globally
        for each in (comm, comm.split(0)):
            assert each.allreduce(x).equal(2 * x)
            assert each.allreduce(big).eq(2).all()
            assert [part.tolist() for part in each.allgather(x[: each.rank])] == [[], x[:1].tolist()]
            assert each.bcast(x).equal(x)
            assert each.alltoall([x, x])[1 - each.rank].equal(x)
            assert each.scatter([x, x]).equal(x)
            assert each.gather_obj(each.rank) == ([0, 1] if each.rank == 0 else None)
            assert each.scatter_obj([1, 2]) == each.rank + 1
            for y in (x, big, x[:0]):
                each.send(y, 1 - each.rank)
                assert each.recv(1 - each.rank).equal(y)
            w = x.clone().requires_grad_()
            phi = torchmn.functions.send(w, each, 1 - each.rank)
            torchmn.functions.recv(each, 1 - each.rank, phi).backward(x)
            assert w.grad is not None and w.grad.equal(x)
