"""A whole training with batch normalisation and unequal batches: the numbers of one process on the whole batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchmn
from tests._worlds import ranks

STEPS = 20
BATCH = 13
CLASSES = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def convnet(seed: int) -> nn.Module:
    """A model in float64, without biases before batch normalisation: Adam would amplify their rounding errors."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, kernel_size=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 3 * 3, 6, bias=False), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, CLASSES),
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return model


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def nearly_equal(comm, step: int) -> slice:
    """Sizes that differ by one."""
    return slice(*torchmn.scatter_index(BATCH, comm, force_equal_length=False))


def lopsided(comm, step: int) -> slice:
    """One image for each rank, except that one rank has none and another has the rest; these change in every step."""
    sizes = [1] * comm.size
    if comm.size > 1:
        sizes[(step + 1) % comm.size] = 0
    sizes[step % comm.size] += BATCH - sum(sizes)
    begin = sum(sizes[: comm.rank])
    return slice(begin, begin + sizes[comm.rank])


def one_process(name: str) -> tuple[list[float], nn.Module]:
    """Returns the losses of all steps, and the trained model."""
    model = convnet(seed=0)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for step in range(STEPS):
        x, t = whole_batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on="mpi")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("share", [nearly_equal, lopsided])
def test_twenty_steps_with_batch_normalisation_and_unequal_batches(comm, name, share):
    expected_losses, expected = one_process(name)
    model = torchmn.create_mnbn_model(convnet(seed=comm.rank), comm)  # rank 0's weights must reach the others
    optimizer = torchmn.create_multi_node_optimizer(OPTIMIZERS[name](model.parameters()), comm, model=model)
    for step in range(STEPS):
        mine = share(comm, step)
        x, t = (part[mine] for part in whole_batch(step))
        optimizer.zero_grad()
        y = model(x)
        # Batch normalisation joins the ranks inside backward: the weight of a rank belongs in its loss, which is NaN
        # where there are no images, the mean of nothing.
        optimizer.weigh(cross_entropy(y, t), len(t)).backward()
        optimizer.step()
        total = comm.allreduce(cross_entropy(y.detach(), t, reduction="sum")).item()
        assert total / BATCH == pytest.approx(expected_losses[step], rel=1e-10)
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert expected_losses[-1] != expected_losses[0]


@ranks(1, 2, 3, on="threads")
def test_the_trained_model_is_evaluated_alike_at_any_number_of_ranks(comm):
    _, model = one_process("sgd")
    images, labels = whole_batch(STEPS)
    data = torch.utils.data.TensorDataset(images, labels)

    @torch.no_grad()
    def evaluate(model: nn.Module, loader) -> dict[str, float]:
        parts = [(model(x), t) for x, t in loader]
        y, t = torch.cat([y for y, _ in parts]), torch.cat([t for _, t in parts])
        return {"loss": cross_entropy(y, t).item(), "accuracy": (y.argmax(1) == t).double().mean().item()}

    model.eval()
    expected = evaluate(model, [(images, labels)])
    share = torchmn.scatter_dataset(data, comm, shuffle=True, seed=1)  # 13 images: some rank has a repeated one
    loader = torch.utils.data.DataLoader(share, batch_size=4)
    found = torchmn.create_multi_node_evaluator(evaluate, comm)(model, loader)
    assert found == pytest.approx(expected, rel=1e-10)
