"""A script of test_worlds_of_one.py: the world that this process gets. Arguments: a name, and a communicator of MPI."""

import sys

import torchmn

options = {}
if sys.argv[2:]:
    from mpi4py import MPI

    options["mpi_comm"] = getattr(MPI, sys.argv[2])
comm = torchmn.create_communicator(sys.argv[1], **options)
sys.stdout.write(f"world {comm.rank} of {comm.size}\n")
