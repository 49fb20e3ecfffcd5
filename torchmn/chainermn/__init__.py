"""ChainerMN's spelling of this library, for scripts that were written for it: docs/from-chainermn.md.

Optional: other_spellings.py loads this package by name when a call, an attribute or an argument is not one of this
library, and nothing imports it. `names` is the table of all public names of ChainerMN.
"""

from torchmn.chainermn import arrays, attributes, calls, mpi_communicators
from torchmn.chainermn.names import NAMES, DataSizeError

__all__ = ["NAMES", "DataSizeError", "arrays", "attributes", "calls", "mpi_communicators"]
