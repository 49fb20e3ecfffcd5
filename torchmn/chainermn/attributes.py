"""Attributes that ChainerMN's communicators have."""

from __future__ import annotations

import warnings
from typing import Any

from torchmn.chainermn.calls import torch_dtype
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.other_spellings import communicator_attributes

_CONFIGURATION = ("allreduce_grad_dtype", "batched_copy")


class CommunicatorConfig:
    """ChainerMN's `set_config` and `get_config` of one communicator."""

    def __init__(self, comm: Communicator):
        self._comm = comm

    def set(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Sets `allreduce_grad_dtype`, the dtype in which gradients are sent; on every rank. Ignores `batched_copy`."""
        if name not in _CONFIGURATION or kwargs:
            wrong = ", ".join(kwargs) or repr(name)
            raise ArgumentError(
                f"rank {self._comm.rank} of {self._comm.size}: set_config: expected one of "
                f"{', '.join(_CONFIGURATION)}, got {wrong}"
            )
        if name == "allreduce_grad_dtype":
            self._comm.settings.grad_dtype = torch_dtype(value)
        elif not value:
            warnings.warn("set_config: batched_copy has no effect: gradients are always sent together", stacklevel=2)

    def get(self, name: str | None = None) -> Any:
        """Returns the value of a setting, or a dict of all; KeyError for an unknown name."""
        values = {"allreduce_grad_dtype": self._comm.settings.grad_dtype, "batched_copy": True}
        return values if name is None else values[name]


communicator_attributes.update(
    allreduce_grad=lambda comm: comm.multi_node_mean_grad,
    broadcast_data=lambda comm: comm.bcast_data,
    set_config=lambda comm: CommunicatorConfig(comm).set,
    get_config=lambda comm: CommunicatorConfig(comm).get,
    batched_copy=lambda comm: True,
    allreduce_grad_dtype=lambda comm: comm.settings.grad_dtype,
    within_config_scope=lambda comm: False,
)
