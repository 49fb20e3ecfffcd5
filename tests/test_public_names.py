"""The public face: every name is there, is loaded when it is used, and a wrong one is answered with the nearest."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchmn


@pytest.mark.parametrize("name", torchmn.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(torchmn, name) is not None


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"Did you mean 'create_communicator'\?"):
        torchmn.create_comunicator  # type: ignore[attr-defined]  # noqa: B018


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = "import sys, torchmn.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
