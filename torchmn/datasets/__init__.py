"""Datasets that come with TorchMN, or that it reads and fetches."""

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.errors import DatasetError
from torchmn.datasets.image_set import ImageSet
from torchmn.datasets.load_cifar10 import cifar10
from torchmn.datasets.load_cifar100 import cifar100
from torchmn.datasets.load_housing import housing
from torchmn.datasets.load_images import images
from torchmn.datasets.load_iris import iris
from torchmn.datasets.load_made_up import ellipses, random, toy_images
from torchmn.datasets.load_mnist import mnist
from torchmn.datasets.load_npz import npz
from torchmn.datasets.load_sparsenet import sparsenet
from torchmn.datasets.load_text import text

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
