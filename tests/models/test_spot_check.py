"""spot_check against an area under the ROC curve that is counted pair by pair."""

from __future__ import annotations

import pytest
import torch

from tests.models.small import small_images, small_model
from torchmn.errors import ArgumentError
from torchmn.models import LabelledBatches, spot_check
from torchmn.models.sparse_autoencoder.best_units import areas_under_curve


def area_by_pairs(values: torch.Tensor, positive: torch.Tensor) -> float:
    """How many pairs (inside the class, outside) are in the right order; equal values count half."""
    inside, outside = values[positive].tolist(), values[~positive].tolist()
    right = sum((a > b) + 0.5 * (a == b) for a in inside for b in outside)
    return right / (len(inside) * len(outside))


def test_areas_are_the_shares_of_pairs_in_the_right_order_ties_included(monkeypatch):
    monkeypatch.setattr("torchmn.models.sparse_autoencoder.best_units.UNITS_AT_ONCE", 3)
    torch.manual_seed(7)
    values = torch.randint(0, 5, (30, 8)).double()
    labels = torch.randint(0, 3, (30,))
    found = areas_under_curve(values, labels)
    assert set(found) == {0, 1, 2}
    for label, areas in found.items():
        expected = [area_by_pairs(values[:, unit], labels == label) for unit in range(8)]
        assert areas.tolist() == pytest.approx(expected)


def test_the_best_unit_of_each_class_is_found_at_its_place():
    model, images = small_model(), small_images(24)
    labels = torch.arange(24) % 4
    found = spot_check(model, LabelledBatches(images, labels, 7))
    features = model.features(images).detach()
    assert [best.label for best in found] == [0, 1, 2, 3]
    for best in found:
        area = area_by_pairs(features[(slice(None), *best.unit)], labels == best.label)
        assert best.auc == pytest.approx(area)
        others = [area_by_pairs(unit, labels == best.label) for unit in features.flatten(1).t()]
        assert best.auc == pytest.approx(max(others))


def test_a_class_without_images_or_without_others_is_left_out():
    model, images = small_model(), small_images(6)
    assert [b.label for b in spot_check(model, [(images, torch.tensor([0, 0, 2, 2, 2, 0]))])] == [0, 2]
    assert spot_check(model, [(images, torch.ones(6, dtype=torch.int64))]) == []


def test_no_batches_are_an_error():
    with pytest.raises(ArgumentError, match="expected at least one batch"):
        spot_check(small_model(), [])
