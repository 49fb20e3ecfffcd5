"""Faster implementations of what the MPI transport does, for ranks that share a host.

The core is complete without this package, and imports it in one place (`create_communicator`), for all ranks or for
none: `TORCHMN_FASTPATH=0` on all ranks leaves it out.
"""
