"""Datasets that come with TorchMN, or that it reads and fetches."""

from torchmn.datasets.errors import DatasetError
from torchmn.datasets.image_set import ImageSet
from torchmn.datasets.load_cifar10 import cifar10
from torchmn.datasets.load_mnist import mnist

__all__ = ["DatasetError", "ImageSet", "cifar10", "mnist"]
