"""Parameters of which a rank holds a slice: the optimizer recognises them without importing the parallel layers."""

from __future__ import annotations

import subprocess
import sys

from torch import nn

from torchmn.gradient_role import UNKNOWN, GradientRole, role_of, set_role


def test_a_slice_is_recognised_by_its_role() -> None:
    whole, slice_ = nn.Linear(2, 1).parameters()
    role = GradientRole("shard")
    set_role(slice_, role)
    assert role_of(slice_) is role
    assert role_of(whole) is UNKNOWN and not UNKNOWN.known


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
