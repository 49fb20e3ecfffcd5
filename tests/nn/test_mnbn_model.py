"""create_mnbn_model: a whole model, and training with it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, filled, gradient, numbers, tensor
from torchmn.nn import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d, create_mnbn_model


class Net(nn.Module):
    """Nested, with a shared layer, a list, a frozen one, and references of the module's own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=0.1, momentum=None), nn.ReLU())
        shared = nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.ReLU()) for _ in range(2)])
        self.tail = nn.ModuleDict({"norm": nn.BatchNorm1d(4, affine=False), "linear": nn.Linear(4, 3)})
        self.kept_elsewhere = [shared]  # a plain list: no registration
        self.other_norms = nn.Sequential(nn.GroupNorm(1, 4), nn.InstanceNorm2d(4), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail["linear"](self.tail["norm"](x.mean((2, 3))))


@ranks(1, 2, on="threads")
def test_every_batch_norm_is_replaced_in_a_copy_and_nothing_else_changes(comm):
    model = filled(Net(), 1)
    model.stem[1].weight.requires_grad_(False)
    model.eval()
    copied = create_mnbn_model(model, comm)
    norm = nn.modules.batchnorm._BatchNorm
    assert not any(isinstance(m, torchmn.nn.layers.batch_norm.MultiNodeBatchNorm) for m in model.modules())
    kinds = {name: type(m) for name, m in copied.named_modules() if isinstance(m, norm)}
    assert kinds == {
        "stem.1": MultiNodeBatchNorm2d,
        "blocks.0.1": MultiNodeBatchNorm2d,
        "tail.norm": MultiNodeBatchNorm1d,
    }
    assert copied.blocks[0][1] is copied.blocks[1][1] is copied.kept_elsewhere[0]
    assert str(copied.other_norms) == str(model.other_norms)
    layer = copied.stem[1]
    assert (layer.eps, layer.momentum, layer.training, layer.weight.requires_grad) == (0.1, None, False, False)
    mine, theirs = copied.state_dict(), model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(copied.parameters(), model.parameters(), strict=True))
    x = tensor(numbers((2, 1, 6, 6), 1), torch.float32)
    assert torch.equal(copied(x), model(x))
    alone = create_mnbn_model(nn.BatchNorm3d(2), comm)
    assert type(alone) is MultiNodeBatchNorm3d
    assert type(create_mnbn_model(alone, comm)) is MultiNodeBatchNorm3d


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_training_on_uneven_batches_gives_the_parameters_of_one_process_on_the_whole_batch(comm):
    serial = filled(Net(), 1).double()
    ours = create_mnbn_model(serial, comm)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (serial, ours)]
    for step in range(5):
        images, labels = tensor(numbers((11, 1, 6, 6), step)), torch.arange(11) % 3
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = cross_entropy(serial(images), labels)
        whole.backward()

        mine = torch.arange(11).tensor_split([1, 6, 6][: comm.size - 1])[comm.rank]  # sizes 1, 5, 0, 5
        loss = cross_entropy(ours(images[mine]), labels[mine], reduction="sum") / 11
        (loss * comm.size).backward()
        comm.multi_node_mean_grad(ours)
        torch.testing.assert_close(comm.allreduce(loss), whole.detach(), rtol=1e-10, atol=0)
        for p, q in zip(ours.parameters(), serial.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(gradient(p), gradient(q), rtol=1e-9, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
    for (key, p), q in zip(ours.state_dict().items(), serial.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


@ranks(1, 2, 3, on="threads")
def test_a_layer_that_cannot_be_replaced_is_named_on_every_rank(comm):
    class Scaled(nn.BatchNorm2d):
        def forward(self, input):  # noqa: A002
            return 2 * super().forward(input)

    patched = nn.BatchNorm2d(2)
    patched.forward = lambda input: input  # noqa: A006
    other = MultiNodeBatchNorm2d(2, comm.split(0))
    layers = {
        "torch.nn.modules.batchnorm.SyncBatchNorm": nn.SyncBatchNorm(2),
        "Scaled, an unknown subclass": Scaled(2),
        "BatchNorm2d, whose forward was replaced": patched,
        "another communicator": other,
    }
    for words, layer in layers.items():
        # On the last rank alone: the others have an ordinary layer, and raise the error too.
        given = layer if comm.rank == comm.size - 1 else nn.BatchNorm2d(2)
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(given))
        culprit = f"rank {comm.size - 1} of {comm.size}"
        assert_refused(comm, lambda m=model: create_mnbn_model(m, comm), culprit, "1.0 (", words)
    assert_refused(comm, lambda: create_mnbn_model("net", comm), "torch.nn.Module", "str")


@ranks(2, on="threads")
def test_models_that_differ_or_can_not_be_copied_are_refused_on_every_rank(comm):
    model = nn.Sequential(nn.BatchNorm2d(2 + comm.rank))
    assert_refused(comm, lambda: create_mnbn_model(model, comm), "BatchNorm2d(3", kind=torchmn.MismatchError)
    holder = nn.Sequential(nn.BatchNorm1d(2))
    if comm.rank == 1:
        holder.cached = torch.ones(2, requires_grad=True) * 2  # deepcopy refuses tensors with a graph
    assert_refused(comm, lambda: create_mnbn_model(holder, comm), "rank 1", "copied", kind=torchmn.ArgumentError)


@ranks(2, on="threads")
def test_a_copy_that_creates_its_layers_again_is_refused_on_every_rank(comm):
    class CreatedAgain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def __deepcopy__(self, memo):
            return CreatedAgain()

    model = nn.Sequential(CreatedAgain() if comm.rank == 1 else nn.Sequential(nn.BatchNorm1d(2)))
    assert_refused(comm, lambda: create_mnbn_model(model, comm), "rank 1", "creates 0.norm", kind=torchmn.ArgumentError)


@ranks(1, on="threads")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_layer_is_named(comm):
    model = nn.Sequential(torch.jit.script(nn.BatchNorm2d(2)))
    assert_refused(comm, lambda: create_mnbn_model(model, comm), "0 (scripted BatchNorm2d")
