"""A slot on loan is free again when its last tensor is gone, in the process that borrowed it."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

pytest.importorskip("mpi4py")

from torchmn.communicators.outbox import _ON_LOAN, SLOT_BYTES, _Loan


def loan_of(process: int) -> tuple[torch.Tensor, ctypes.c_uint64]:
    """A tensor in a slot that is on loan to that process, and the slot's number."""
    memory, number = ctypes.create_string_buffer(SLOT_BYTES), ctypes.c_uint64(_ON_LOAN)
    loan = _Loan.from_address(ctypes.addressof(memory))
    loan.outbox, loan.number, loan.process = memory, number, process  # type: ignore[assignment]
    return torch.frombuffer(loan, dtype=torch.float32, count=6), number


def test_a_slot_is_free_when_the_last_view_of_its_tensor_is_gone() -> None:
    x, number = loan_of(os.getpid())
    view = x.view(2, 3)[1]
    del x
    assert number.value == _ON_LOAN
    del view
    assert number.value == 0


def test_a_forked_child_that_drops_its_copy_does_not_free_the_slot() -> None:
    x, number = loan_of(os.getpid() + 1)
    del x
    assert number.value == _ON_LOAN
