"""The public names: each can be imported, is loaded on first use, and errors for wrong ones contain the nearest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from torchmn import functions


@pytest.mark.parametrize("name", torchmn.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(torchmn, name) is not None


def test_the_error_for_a_wrong_name_contains_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"Did you mean 'create_communicator'\?"):
        torchmn.create_comunicator  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm: torchmn.create_mnbn_model(comm, nn.Linear(1, 1)), "create_mnbn_model: .* of type Linear"),
        (lambda comm: torchmn.scatter_dataset(comm, [1, 2]), "scatter_dataset: .* a list of 2"),
        (lambda comm: torchmn.ProcessGrid(2, height=1), "ProcessGrid: .* 2$"),
        (lambda comm: torchmn.training.Logger("log.jsonl"), "Logger: .* 'log.jsonl'$"),
    ],
)
def test_arguments_in_the_wrong_order_are_recognised(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(
        torchmn.ArgumentError, match=rf"^{message}".replace(".*", "expected comm to be a communicator.*")
    ):
        call(torchmn.create_communicator("solo"))


def test_the_error_of_a_collective_function_with_the_tensor_first_contains_the_right_call() -> None:
    comm = torchmn.create_communicator("solo")
    for function in (functions.allreduce, functions.allgather, functions.bcast, functions.gather):
        with pytest.raises(torchmn.ArgumentError, match=r"F\.allreduce\(comm, x\), got a torch\.float32 tensor"):
            function(torch.ones(2), comm)


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = "import sys, torchmn.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
