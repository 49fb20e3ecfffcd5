"""A parameter of which a rank holds a slice: the optimizer knows it without loading what only such models need."""

from __future__ import annotations

import subprocess
import sys

from torch import nn

from torchmn.nn.parts import roles
from torchmn.optim.own_slices import replicas_of


def test_a_slice_is_known_by_its_mark() -> None:
    whole, slice_ = nn.Linear(2, 1).parameters()
    ranks = object()
    roles.mark_own(slice_, ranks)
    assert replicas_of(slice_) is ranks
    assert replicas_of(whole) is None


def test_training_loads_no_layers() -> None:
    code = """
import sys, torch, torchmn
model = torch.nn.Linear(2, 1)
comm = torchmn.create_communicator("solo")
optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
model(torch.ones(1, 2)).sum().backward()
before = model.bias.item()
optimizer.step()
assert abs(model.bias.item() - (before - 0.1)) < 1e-6, model.bias
sys.exit(", ".join(name for name in sys.modules if name.startswith("torchmn.nn")) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
