"""Every guard of multi-node optimizers raises its error, and steps are the same without guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds.jobs import run_job, without_package
from torchmn.errors import MismatchError
from torchmn.optim import GUARDS, create_multi_node_optimizer


def trained(comm: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, after a backward with different gradients on each rank."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    model(torch.full((4, 3), float(comm.rank + 1))).square().mean().backward()
    return model, optimizer


def clips_before_the_mean(comm: Any) -> None:
    model, optimizer = trained(comm)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def writes_on_one_rank(comm: Any) -> None:
    model, optimizer = trained(comm)
    if comm.rank == 0:
        with torch.no_grad():
            model.weight.add_(1)
    optimizer.step()


def another_rate(comm: Any) -> None:
    _, optimizer = trained(comm)
    optimizer.param_groups[0]["lr"] = 0.1 * (comm.rank + 1)
    optimizer.step()


def another_mode(comm: Any) -> None:
    model, optimizer = trained(comm)
    model.train(comm.rank == 0)
    optimizer.step()


def fails_in_the_background(comm: Any) -> None:
    _, optimizer = trained(comm)

    def work() -> None:
        if comm.rank == 1:
            raise OSError("No space left on device")

    comm.background.start("writer", work, MismatchError).join()
    try:
        optimizer.step()
    finally:
        comm.background.close()


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "LocalClipping": (clips_before_the_mean, "clip_grad_norm_ was called before the gradients were averaged"),
    "BackgroundFailures": (fails_in_the_background, "rank 1 of 2: writer: No space left on device"),
    "ReplicaConsistency": (writes_on_one_rank, "only some ranks have modified what must be the same on all"),
    "Hyperparameters": (another_rate, "hyperparameters"),
    "TrainingMode": (another_mode, "mode of the model"),
}

GUARDS.load()
pytestmark = pytest.mark.guard


@pytest.mark.parametrize("name", [*GUARDS.entries()])
def test_a_guard_refuses_what_it_is_for_and_nothing_else_does(name: str) -> None:
    provoke, text = CASES[name]
    assert GUARDS.entries()[name].why
    with pytest.raises(MismatchError, match=text):
        torchmn.run_threads(provoke, 2)
    with GUARDS.without(name):
        torchmn.run_threads(provoke, 2)


def test_every_guard_has_a_case() -> None:
    assert set(CASES) == set(GUARDS.entries())


STEPS = """
import torch, torchmn
from torch import nn

x, start = torch.randn(8, 3), nn.Linear(3, 2)  # ranks that are threads share torch's random generator

def body(comm):
    serial, model = nn.Linear(3, 2), nn.Linear(3, 2)
    serial.load_state_dict(start.state_dict())
    model.load_state_dict(start.state_dict())
    one = torch.optim.Adam(serial.parameters())
    all_ = torchmn.create_multi_node_optimizer(torch.optim.Adam(model.parameters()), comm, model=model, overlap=OVERLAP)
    for _ in range(3):
        for net, optimizer, mine in ((serial, one, x), (model, all_, x.chunk(2)[comm.rank])):
            optimizer.zero_grad()
            net(mine).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(serial.parameters()))

for OVERLAP in (False, True):
    torchmn.run_threads(body, 2)
"""


def test_steps_are_those_of_one_process_with_the_guards_taken_away() -> None:
    result = run_job(without_package("torchmn.optim.guards") + STEPS, 1, "solo")
    assert result.returncode == 0, result.output
