"""examples/train_gb.py: the same costs and the same best units on one rank and on two tiles."""

import json
import re

import pytest

from tests.examples.running import run_example


def outcome(launcher: str, out) -> tuple[list[dict], list[str]]:
    result = run_example("train_gb.py", launcher, out, "--float64")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert {"reconstructions.png", "stimuli.png"} <= {path.name for path in out.iterdir()}
    return rows, re.findall(r"digit .*", result.stdout)


def test_two_ranks_have_the_costs_the_accuracy_and_the_units_of_one(tmp_path):
    one, units = outcome("alone", tmp_path / "one")
    two, same_units = outcome("mpiexec", tmp_path / "two")
    assert len(one) == 3 * 2 + 1 and len(units) == 10
    for row, other in zip(one, two, strict=True):
        for name in {"reconstruction", "sparsity", "cost", "accuracy"} & set(row):
            assert other[name] == pytest.approx(row[name], rel=1e-8)
    assert units == same_units
    for stack in range(3):
        first, second = (row["cost"] for row in one if row.get("stack") == stack)
        assert second < first
