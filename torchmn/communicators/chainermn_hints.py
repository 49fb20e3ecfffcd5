"""What ChainerMN's users look for on a communicator, and what it is called here: docs/from-chainermn.md."""

from __future__ import annotations

_TODAY = {
    "allreduce_grad": "call multi_node_mean_grad",
    "broadcast_data": "call bcast_data",
    "mpi_comm": "give one of your own to create_communicator(mpi_comm=...) and keep it; barrier() is here",
    **dict.fromkeys(
        ("set_config", "get_config", "config_scope"),
        "configure it when it is made: create_communicator(grad_dtype=..., timeout=...)",
    ),
}


def advice(name: str) -> str:
    """Returns what to use instead of a name of ChainerMN's; "" for other names."""
    return f"; of ChainerMN's names: {_TODAY[name]}" if name in _TODAY else ""
