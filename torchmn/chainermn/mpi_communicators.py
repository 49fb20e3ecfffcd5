"""mpi4py's communicators where this library expects its own, and `comm.mpi_comm`."""

from __future__ import annotations

import sys
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.creation.create import create_communicator
from torchmn.other_spellings import adapters, advice, communicator_attributes


def _communicator_of(given: object) -> Communicator | None:
    """Returns the communicator of an mpi4py communicator; all of its ranks must call, the first time.

    It is an attribute of the mpi4py communicator, in MPI's sense.
    """
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    if not isinstance(given, MPI.Intracomm) or given == MPI.COMM_NULL:
        return None
    key = _keyval(MPI)
    known: Any = given.Get_attr(key)
    if known is None:
        known = create_communicator("mpi", mpi_comm=given)
        given.Set_attr(key, known)
    return known


_keyvals: list[int] = []


def _keyval(mpi: Any) -> int:
    """Returns the key of the attribute."""
    if not _keyvals:
        _keyvals.append(mpi.Comm.Create_keyval())
    return _keyvals[0]


def _mpi_comm(comm: Communicator) -> Any:
    transport: Any = comm.transport
    if not hasattr(transport, "for_users"):
        raise AttributeError(
            f"'Communicator' object has no attribute 'mpi_comm'; instead: {advice['Communicator.mpi_comm']}",
            name="mpi_comm",
        )
    if transport.outside is None:
        comm.agree("mpi_comm of a communicator that was split off, used for the first time")
    return transport.for_users()


adapters.append(_communicator_of)
communicator_attributes["mpi_comm"] = _mpi_comm
