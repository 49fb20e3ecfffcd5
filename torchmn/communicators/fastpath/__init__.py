"""A faster MPI transport for ranks on one host (optional).

The core is complete without this package. `create_communicator` loads it, on all ranks or on none: `TORCHMN_FASTPATH=0`
on all ranks switches it off.
"""
