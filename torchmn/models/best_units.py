"""Which single unit at the top of a network tells a class best from the others: the test for a "cat neuron"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmn.models.batches import Batches
from torchmn.models.sparse_autoencoder import SparseAutoencoder

UNITS_AT_ONCE = 512  # bounds the memory of the sorted copies


@dataclass(frozen=True)
class BestUnit:
    """The top unit (map, row, column) whose value alone separates `label` from all other labels best.

    auc: the probability that an image of the class excites the unit more than an image of another class
    """

    label: int
    unit: tuple[int, int, int]
    auc: float


@torch.no_grad()
def spot_check(model: SparseAutoencoder, batches: Batches) -> list[BestUnit]:
    """The best single top unit of each class, by the area under its ROC curve; labels in ascending order.

    batches: of (images, labels). A class of which there are no images, or no others, is left out.
    """
    features, labels = zip(*((model.features(x).flatten(1), y) for x, y in batches), strict=True)
    values, classes = torch.cat(features), torch.cat(labels)
    found = areas_under_curve(values, classes)
    _, rows, columns = model.feature_shape
    best = []
    for label, areas in found.items():
        number = int(areas.argmax())
        unit = number // (rows * columns), number // columns % rows, number % columns
        best.append(BestUnit(label, unit, areas[number].item()))
    return best


def areas_under_curve(values: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Of each label, every unit's area under the ROC curve: (units,), float64. Equal values count half.

    values: (images, units); labels: (images,)
    """
    present = [label for label in labels.unique().tolist() if not (labels == label).all()]
    if not present:
        return {}
    members = torch.stack([labels == label for label in present]).double()
    inside = members.sum(1, keepdim=True)
    rank_sums = torch.cat([members @ _ranks(some) for some in values.split(UNITS_AT_ONCE, dim=1)], dim=1)
    # Mann and Whitney: what the ranks of a class exceed the smallest possible ones by is the number of its pairs with
    # other images that are in the right order.
    right_order = rank_sums - inside * (inside + 1) / 2
    return dict(zip(present, right_order / (inside * (len(labels) - inside)), strict=True))


def _ranks(values: Tensor) -> Tensor:
    """The rank of each image among all, from 1, per unit: (images, units). Equal values share their mean rank."""
    columns = values.t().contiguous()
    order = columns.sort(dim=1).values
    below = torch.searchsorted(order, columns)
    up_to = torch.searchsorted(order, columns, right=True)
    return ((below + up_to + 1).double() / 2).t()
