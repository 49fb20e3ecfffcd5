"""spot_check: finds the single top unit that separates a class best from all others, such as a "cat neuron"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmn.models.sparse_autoencoder.batches import Batches
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder
from torchmn.models.sparse_autoencoder.placement import Placement
from torchmn.sharded.tensor import ShardedTensor, local

Unit = tuple[int, int, int]  # map, row, column

UNITS_AT_ONCE = 512  # bounds the memory of the sorted copies


@dataclass(frozen=True)
class BestUnit:
    """The top unit whose value alone separates a label best from all others.

    Attributes:
        label: of the class.
        unit: (map, row, column).
        auc: area under the ROC curve: the probability that an image of the class excites the unit more than an image
            of another class.
    """

    label: int
    unit: Unit
    auc: float


@torch.no_grad()
def spot_check(model: SparseAutoencoder, batches: Batches) -> list[BestUnit]:
    """Returns the top unit of each class with the largest area under its ROC curve, in ascending order of labels.

    Of a parallel model, all ranks must call it, and all get the same result.

    Args:
        model: the network.
        batches: of (images, labels).

    Returns:
        One unit per class. A class without images, or the only one, is left out.

    Raises:
        ArgumentError: if there are no batches.
    """
    placement = Placement(model, model.in_shape)
    found = [(model.features(placement.shard(x, y)), y) for x, y in batches]
    placement.agree("spot_check", None if found else "expected at least one batch of (images, labels), got none")
    batch_features, labels = zip(*found, strict=True)
    corner, extents = _tile(batch_features[0])
    features = placement.of_all_replicas(torch.cat([local(x).flatten(1) for x in batch_features]))
    areas = areas_under_curve(features, placement.of_all_replicas(torch.cat(labels)))
    of_tile = [_best(label, area, corner, extents) for label, area in areas.items() if area.numel()]
    units = sorted(placement.of_all_tiles(of_tile), key=lambda best: (best.label, -best.auc, best.unit))
    return [best for at, best in enumerate(units) if at == 0 or best.label != units[at - 1].label]


def _tile(features: Tensor) -> tuple[Unit, Unit]:
    """Returns the first unit of this rank's tile, and the number of units in each dim."""
    if not isinstance(features, ShardedTensor):
        maps, rows, columns = features.shape[1:]
        return (0, 0, 0), (maps, rows, columns)
    layout = features.spec
    maps, rows, columns = (layout.interval(dim) for dim in (1, 2, 3))
    return (maps.start, rows.start, columns.start), (len(maps), len(rows), len(columns))


def _best(label: int, areas: Tensor, corner: Unit, extents: Unit) -> BestUnit:
    number = int(areas.argmax())
    _, rows, columns = extents
    unit = number // (rows * columns), number // columns % rows, number % columns
    at = corner[0] + unit[0], corner[1] + unit[1], corner[2] + unit[2]
    return BestUnit(label, at, areas[number].item())


def areas_under_curve(values: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Returns for each label the area under the ROC curve of every unit: (units,), float64. Equal values count half.

    Args:
        values: (images, units).
        labels: (images,).

    Returns:
        The areas by label.
    """
    present = [label for label in labels.unique().tolist() if not (labels == label).all()]
    if not present:
        return {}
    members = torch.stack([labels == label for label in present]).double()
    inside = members.sum(1, keepdim=True)
    rank_sums = torch.cat([members @ _ranks(units) for units in values.split(UNITS_AT_ONCE, dim=1)], dim=1)
    # Mann-Whitney U: the rank sum of a class minus the smallest possible one is the number of pairs of its images with
    # other images that are in the right order.
    right_order = rank_sums - inside * (inside + 1) / 2
    return dict(zip(present, right_order / (inside * (len(labels) - inside)), strict=True))


def _ranks(values: Tensor) -> Tensor:
    """Returns the rank of each image, from 1, per unit: (images, units). Equal values have their mean rank."""
    columns = values.t().contiguous()
    order = columns.sort(dim=1).values
    below = torch.searchsorted(order, columns)
    up_to = torch.searchsorted(order, columns, right=True)
    return ((below + up_to + 1).double() / 2).t()
