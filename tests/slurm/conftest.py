"""Skips the tests of this folder where no cluster runs, and removes each test's jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.jobs import cancel_all

CLUSTER = "TORCHMN_TEST_SLURM"  # set by tools/slurm.py


@pytest.fixture(autouse=True)
def queue() -> Iterator[None]:
    if not os.environ.get(CLUSTER):
        pytest.skip("needs a Slurm cluster: make test-slurm")
    yield
    cancel_all()
