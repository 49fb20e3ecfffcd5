"""The tool that chose the embedded sample."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.datasets.files import SAMPLE, write_idx

TOOL = Path(__file__).parents[2] / "tools" / "build_mnist_sample.py"
spec = importlib.util.spec_from_file_location("build_mnist_sample", TOOL)
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_it_chooses_equally_many_of_each_class_spread_over_the_file():
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    positions = tool.chosen(labels, per_class=50)
    assert np.bincount(labels[positions]).tolist() == [50] * 10
    assert (np.diff(positions) > 0).all()
    halves = (positions < 2500).sum(), (positions >= 2500).sum()
    assert min(halves) > 200


def test_the_packed_file_names_neither_its_time_nor_its_place_so_that_building_again_gives_the_same(tmp_path):
    write_idx(tmp_path / "values.gz", np.arange(9, dtype=np.uint8))
    flags_and_time = (tmp_path / "values.gz").read_bytes()[3:8]
    assert flags_and_time == bytes(5)


def test_it_refuses_a_source_that_is_not_mnist(tmp_path):
    with pytest.raises(SystemExit, match="is not MNIST's"):
        tool.build(SAMPLE, tmp_path)
    assert list(tmp_path.iterdir()) == []
