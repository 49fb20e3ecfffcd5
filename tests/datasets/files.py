"""Files of data sets: the IDX and MATLAB formats, and the bundled sample of MNIST."""

from torchmn.datasets.formats.idx import read_idx, write_idx
from torchmn.datasets.formats.matlab import read_matlab
from torchmn.datasets.load_mnist import SAMPLE, mnist_arrays

__all__ = ["SAMPLE", "mnist_arrays", "read_idx", "read_matlab", "write_idx"]
