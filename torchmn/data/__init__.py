"""Data sets distributed over ranks: by items (`scatter_dataset`), by image regions (`scatter_regions`), or empty."""

from torchmn.data.empty import EmptyDataset, create_empty_dataset
from torchmn.data.micro_batches import MicroBatches
from torchmn.data.regions import RegionDataset, scatter_regions
from torchmn.data.scatter import scatter_dataset, scatter_index
from torchmn.data.scattered import ScatteredDataset
from torchmn.data.stream import ScatteredStream

__all__ = [
    "EmptyDataset",
    "MicroBatches",
    "RegionDataset",
    "ScatteredDataset",
    "ScatteredStream",
    "create_empty_dataset",
    "scatter_dataset",
    "scatter_index",
    "scatter_regions",
]
