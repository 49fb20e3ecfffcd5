"""`DataSizeError`, for scripts that catch it. ChainerMN's last versions did not raise it either."""

from __future__ import annotations

from torchmn.other_spellings import module_names


class DataSizeError(RuntimeError):
    """Not raised: data sets and objects of any size can be sent."""


module_names["DataSizeError"] = module_names["datasets.DataSizeError"] = lambda: DataSizeError
