"""The demo: the same numbers at any number of ranks, and an honest exit status."""

import json
from pathlib import Path

import pytest

from tests._worlds import JobResult, run_job

DEMO = Path(__file__).parents[2] / "examples" / "demo_mnist.py"


def demo(n: int, transport: str, report: Path, expect: float = 0.0) -> JobResult:
    args = ["--epochs", "1", "--expect", str(expect), "--report", str(report)]
    return run_job(DEMO, n, transport, args=args, env={"OMP_NUM_THREADS": "1"}, timeout=100)


def numbers(report: Path) -> dict:
    return json.loads((report / "report.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    report = tmp_path_factory.mktemp("alone")
    result = demo(1, "solo", report)
    assert result.returncode == 0, result.output
    return numbers(report)


@pytest.mark.parametrize(("n", "expect"), [(2, 0.5), (3, 1.01)])
def test_ranks_give_the_numbers_of_one_process_and_fail_below_the_expected_accuracy(n, expect, alone, tmp_path):
    """6,000 images in batches of 64: the last batch is shorter, and three ranks never share one evenly."""
    result = demo(n, "mpi", tmp_path, expect)
    if expect < 1:
        assert result.returncode == 0, result.output
    else:
        assert result.returncode == 1
        assert "expected: at least 101.0%" in result.output
    together = numbers(tmp_path)
    assert together["ranks"] == n
    assert len(together["loss_of_each_step"]) == 94
    assert together["loss_of_each_step"] == pytest.approx(alone["loss_of_each_step"], rel=1e-10)
    assert together["epochs"][0]["accuracy"] == alone["epochs"][0]["accuracy"]


def test_it_learns(alone):
    assert alone["loss_of_each_step"][0] == pytest.approx(2.3, abs=0.1)  # ln 10: nothing known
    assert alone["epochs"][0]["accuracy"] > 0.8
