"""Wrong uses of send and recv in jobs of processes: the job ends and names the lines of the send and of the recv."""

from __future__ import annotations

import re

import pytest

from tests._worlds.jobs import run_job

START = """
import torch, torchmn
from torchmn import functions as F
comm = torchmn.create_communicator()
x = torch.ones(3, requires_grad=True)
def there(x): return F.send(x, comm, 1)
def here(): return F.recv(comm, 0)
"""

WRONG = {
    "D1": "if comm.rank == 0: there(x); F.recv(comm, 1).sum().backward()\nelse: F.send(here(), comm, 0).backward()",
    "D2": "if comm.rank == 0: there(x)\nelse: here().sum().backward()",
    "D3": """
if comm.rank == 0:
    there(x)
    F.send(x, comm, 1).backward()
else:
    (here() * F.recv(comm, 0)).sum().backward()
""",
    "D4": """
if comm.rank == 0:
    output = F.recv(comm, 1) * x
    there(output)
    output.sum().backward()
else:
    phi = F.send(x * 2, comm, 0)
    (here().sum() + phi).backward()
""",
}

UNUSED = """
if comm.rank == 0:
    there(x).backward()
else:
    unused = here()
    comm.barrier()
"""


@pytest.mark.parametrize(("scenario", "transport"), [*((scenario, "mpi") for scenario in WRONG), ("D1", "gloo")])
def test_a_forgotten_delegate_ends_the_job_and_names_both_lines(scenario: str, transport: str) -> None:
    result = run_job(START + WRONG[scenario], 2, transport, env={"TORCHMN_TIMEOUT": "20"})
    assert not result.timed_out and not result.survivors, result.output
    assert result.returncode != 0
    assert "backward did not visit the send to rank 1, tag 0" in result.output
    assert re.search(
        r"script\.py:6 in there, but its gradient came back from the recv at \S*script\.py:7 in here", result.output
    )


def test_a_value_that_is_not_joined_to_the_loss_ends_in_the_table_with_both_lines() -> None:
    result = run_job(START + UNUSED, 2, "mpi", env={"TORCHMN_TIMEOUT": "2"})
    assert not result.timed_out and not result.survivors, result.output
    assert result.returncode != 0
    assert re.search(r"0 +\S+ +backward of send +rank 1 +0 ", result.output)
    assert re.search(r"gradient of what it sent to rank 1 at \S*script\.py:6 in there;", result.output)
    assert re.search(r"rank 1 received it at \S*script\.py:7 in here", result.output)


def test_the_right_use_of_all_of_them_ends_well() -> None:
    body = """
if comm.rank == 0:
    phi = there(x)
    output = F.recv(comm, 1, delegate_variable=phi)
    last = F.send(output * 2, comm, 1)
    final = F.send(output * 3, comm, 1)
    F.pseudo_connect(F.pseudo_connect(last, final), output).sum().backward()
    assert x.grad.tolist() == [5.0 * (1 + 2 + 3)] * 3, x.grad
else:
    y = F.recv(comm, 0)
    phi = F.send(y * 5, comm, 0)
    evaluation = F.recv(comm, 0, delegate_variable=phi) + F.recv(comm, 0)
    evaluation.sum().backward()
print("RIGHT")
"""
    result = run_job(START + body, 2, "mpi", env={"TORCHMN_TIMEOUT": "20"})
    assert result.returncode == 0, result.output
    assert result.stdout.count("RIGHT") == 2
