"""Calls with the argument names and positions of ChainerMN."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.source_lines import is_library_module, running_frames
from torchmn.errors import ArgumentError
from torchmn.other_spellings import Respelled, calls

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """Returns the dtype that `dtype`, of NumPy or torch, means; None for None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ArgumentError(f"expected a dtype of torch or NumPy, got {dtype!r}: {error}") from None


@functools.cache
def _warn_once(text: str) -> None:
    frames = itertools.takewhile(lambda frame: is_library_module(frame.f_globals["__name__"]), running_frames())
    warnings.warn(text, stacklevel=1 + len(list(frames)))  # at the user's line


def _ignore(function: str, keyword: str, args: tuple[Any, ...]) -> None:
    comm = next((arg for arg in args if isinstance(arg, Communicator)), None)
    if comm is None or comm.rank == 0:
        _warn_once(f"{function}: {keyword} is accepted for scripts of ChainerMN, and has no effect here")


class Spelling:
    """The differences between a function of ChainerMN and that of this library.

    Args:
        renamed: names of its arguments, and of ours.
        ignored: names of arguments without a meaning here, and their position, or -1 if they are keywords only.
        positions: our names of arguments that are keywords here, from position `first` on.
        first: number of the position.
        values: by our name: converts an argument.
        defaults: arguments that are required here.
    """

    def __init__(
        self,
        renamed: Mapping[str, str] | None = None,
        ignored: Mapping[str, int] | None = None,
        positions: tuple[str, ...] = (),
        first: int = 0,
        values: Mapping[str, Callable[[Any], Any]] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ):
        self.renamed, self.ignored = renamed or {}, ignored or {}
        self.positions, self.first = positions, first
        self.values, self.defaults = values or {}, defaults or {}

    def respell(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled | None:
        """Returns a call of `function` in our spelling; None if it is the same as before."""
        new_args, new = list(args), dict(kwargs)
        for keyword, position in self.ignored.items():
            if keyword in new:
                del new[keyword]
                _ignore(function, keyword, (*args, *kwargs.values()))
            elif 0 <= position < len(new_args):
                del new_args[position]
                _ignore(function, keyword, args)
        for theirs, ours in self.renamed.items():
            if theirs in new and ours not in new:
                new[ours] = new.pop(theirs)
        if self.positions and len(new_args) > self.first:
            named = dict(zip(self.positions, new_args[self.first :], strict=False))
            if len(named) < len(new_args) - self.first or not named.keys().isdisjoint(new):
                return None
            del new_args[self.first :]
            new |= named
        new |= {name: convert(new[name]) for name, convert in self.values.items() if name in new}
        if (tuple(new_args), new) == (args, kwargs):
            new |= {name: value for name, value in self.defaults.items() if name not in new}
            return Respelled(args, new) if self.defaults and len(new) > len(kwargs) else None
        return Respelled(tuple(new_args), {**self.defaults, **new})


def _names_of_state(function: str, example: str) -> Callable[..., None]:
    """Returns a function that refuses a trainer: here each object has a name, and ranks agree on what they save."""

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = ", ".join([type(arg).__name__ for arg in args[1:]] or kwargs)
        raise ArgumentError(f"{function}: expected a name for each object, as in {example}, got {given}: no trainer")

    return refuse


def _recv_obj(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled | None:
    """`recv_obj(source, status=None, tag=ANY_TAG)`: `status`, of mpi4py, gets the source and the tag."""
    if "status" in kwargs:
        status, kwargs = kwargs["status"], {name: value for name, value in kwargs.items() if name != "status"}
    elif len(args) == 4:
        args, status = (*args[:2], args[3]), args[2]
    else:
        return None
    source = kwargs.get("source", args[1] if len(args) > 1 else None)
    tag = kwargs.get("tag", args[2] if len(args) > 2 else 0)

    def finish(obj: Any) -> Any:
        if status is not None:
            status.source, status.tag = source, tag
        return obj

    return Respelled(args, kwargs, finish)


_COMMUNICATOR = {"communicator": "comm"}
_SPELLINGS = {
    "create_communicator": Spelling(
        {"communicator_name": "name", "allreduce_grad_dtype": "grad_dtype"},
        {"batched_copy": -1},
        values={"grad_dtype": torch_dtype},
    ),
    "create_multi_node_optimizer": Spelling(_COMMUNICATOR, positions=("double_buffering", "zero_fill"), first=2),
    "create_multi_node_evaluator": Spelling(_COMMUNICATOR),
    "create_multi_node_checkpointer": Spelling(
        {"cp_interval": "keep"},
        {"gc_interval": 3},
        positions=("keep", "path"),
        first=2,
        defaults={"path": "result"},
    ),
    "create_multi_node_iterator": Spelling({"actual_iterator": "dataloader", **_COMMUNICATOR}),
    "create_synchronized_iterator": Spelling({"actual_iterator": "dataloader", **_COMMUNICATOR}),
    "create_mnbn_model": Spelling({"link": "model"}, {"communication_backend": 2}),
    "create_multi_node_n_step_rnn": Spelling({"actual_link": "rnn", **_COMMUNICATOR}),
    "scatter_dataset": Spelling(ignored={"max_buf_len": -1}),
    "scatter_index": Spelling({"n_total_samples": "n"}),
    "MultiNodeBatchNormalization.__init__": Spelling(ignored={"communication_backend": 10}),
    "MultiNodeEarlyStoppingTrigger.__init__": Spelling(ignored={"verbose": -1, "suffix": -1}),
    "MultiNodeChainList.add_link": Spelling({"link": "module"}),
    "send": Spelling(_COMMUNICATOR),
    "recv": Spelling(_COMMUNICATOR, {"device": -1}),
    **{name: Spelling(ignored={"device": 3}) for name in ("bcast", "gather", "scatter")},
    **{name: Spelling(ignored={"device": 2}) for name in ("allgather", "alltoall")},
    "GenericMultiNodeEvaluator.evaluate": Spelling(ignored={"trainer": 1}),
    "Communicator.bcast_obj": Spelling(ignored={"max_buf_len": 2}),
    "Communicator.bcast": Spelling({"data": "x"}, {"max_buf_len": 2}),
    **{f"Communicator.{name}": Spelling({"data": "x"}) for name in ("send", "gather", "allgather", "allreduce")},
}
calls.update(
    {name: functools.partial(spelling.respell, name.removesuffix(".__init__")) for name, spelling in _SPELLINGS.items()}
)
calls["Communicator.recv_obj"] = _recv_obj
for _name, _example in (("save", "save(step, model=model, optimizer=optimizer)"),
                        ("maybe_load", "maybe_load(model=model, optimizer=optimizer)")):  # fmt: skip
    calls[f"MultiNodeCheckpointer.{_name}"] = _names_of_state(_name, _example)
