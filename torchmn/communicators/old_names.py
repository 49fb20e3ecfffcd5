"""What ChainerMN's users look for on a communicator, and what it is called here: docs/from-chainermn.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_TODAY = {
    "allreduce_grad": "call multi_node_mean_grad",
    "broadcast_data": "call bcast_data",
    "mpi_comm": "give one of your own to create_communicator(mpi_comm=...) and keep it; barrier() is here",
    **dict.fromkeys(
        ("set_config", "get_config", "config_scope"),
        "configure it when it is made: create_communicator(grad_dtype=..., timeout=...)",
    ),
}


class OldNames:
    """Says what to use instead of a name of ChainerMN's."""

    if not TYPE_CHECKING:  # a type checker would believe that every name exists

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            advice = f"; of ChainerMN's names: {_TODAY[name]}" if name in _TODAY else ""
            # With the name and the object, Python itself offers the nearest name.
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{advice}", name=name, obj=self)
