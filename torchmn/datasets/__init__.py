"""Datasets that come with TorchMN, or that it reads and fetches."""

from torchmn.datasets.arrays import Arrays, ImageSet
from torchmn.datasets.load_cifar10 import cifar10
from torchmn.datasets.load_cifar100 import cifar100
from torchmn.datasets.load_images import images
from torchmn.datasets.load_mnist import mnist
from torchmn.datasets.load_npz import npz
from torchmn.datasets.load_sparsenet import sparsenet
from torchmn.datasets.load_synthetic import ellipses, random, toy_images
from torchmn.datasets.load_tables import housing, iris
from torchmn.datasets.load_text import text
from torchmn.errors import DatasetError

__all__ = [
    "Arrays",
    "DatasetError",
    "ImageSet",
    "cifar10",
    "cifar100",
    "ellipses",
    "housing",
    "images",
    "iris",
    "mnist",
    "npz",
    "random",
    "sparsenet",
    "text",
    "toy_images",
]
