"""Replacements for attributes of ChainerMN's communicators; see docs/from-chainermn.md."""

from __future__ import annotations

_REPLACEMENTS = {
    "allreduce_grad": "call multi_node_mean_grad",
    "broadcast_data": "call bcast_data",
    "mpi_comm": "pass your MPI communicator to create_communicator(mpi_comm=...) and keep it; barrier() is a method",
    **dict.fromkeys(
        ("set_config", "get_config", "config_scope"),
        "pass settings to create_communicator(grad_dtype=..., timeout=...)",
    ),
}


def replacement(name: str) -> str:
    """Returns the end of an error message that names the replacement of an attribute of ChainerMN; "" for others."""
    return f"; instead of ChainerMN's: {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
