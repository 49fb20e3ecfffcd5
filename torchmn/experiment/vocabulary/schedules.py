"""How the learning rate changes from epoch to epoch: in a few words of ours, or as a class of torch.optim.lr_scheduler.

Both depend on nothing but the epoch: after a resume they are what they would have been.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    create_model,
    model_validator,
)
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.fields import DEFINITION, Count, NotNegative, Positive, ReferenceOrNested, problem
from torchmn.experiment.file.registry import Options
from torchmn.experiment.file.registry import schedules as registered

# The shapes of a schedule, and how a file says each of them.
SHAPES = {
    "step": "{step: [5, 8], ratio: 0.1}", "every": "{every: 3, ratio: 0.1}", "exponential": "{exponential: 0.9}",
    "linear": "{linear: 0.0}", "cosine": "{cosine: 0.0}",
}  # fmt: skip


class Schedule(BaseModel):
    """How the learning rate changes: one of step, every, exponential, linear, cosine."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: list[Count] | None = Field(None, description="after these many epochs it is multiplied by ratio")
    every: Count | None = Field(None, description="after each so many epochs it is multiplied by ratio")
    ratio: Positive | None = Field(None, description="goes with step and every; 0.1 if it is not said")
    shift: int | None = Field(None, ge=0, description="so many epochs earlier; goes with step and every")
    exponential: Positive | None = Field(None, description="it is multiplied by this after each epoch")
    linear: NotNegative | None = Field(None, description="it goes in a line to this share, in the last epoch")
    cosine: NotNegative | None = Field(None, description="it goes in half a wave to this share, in the last epoch")

    @model_validator(mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        if isinstance(given, dict):
            named = [name for name in SHAPES if given.get(name) is not None]
            without = [name for name in SHAPES if name in given and not named]
            if without:  # `{cosine: }`
                raise problem(f"{without[0]!r} needs a value, as {SHAPES[without[0]]}")
            unknown = set(given) - set(SHAPES) - {"ratio", "shift"}
            if len(named) != 1 and not unknown:
                has = " and ".join(named) or "none of them"
                raise problem(f"has {has}: expected one of {', '.join(SHAPES)}, or the name of a torch class")
            unused = [name for name in ("ratio", "shift") if given.get(name) is not None]
            if unused and not unknown and named[0] not in ("step", "every"):
                raise problem(f"has {unused[0]} beside {named[0]}: it goes with step and every")
        return given

    def factor(self, epoch: int, epochs: int) -> float:
        """By what the learning rate is multiplied in `epoch` (the first is 0) of `epochs`."""
        done = epoch / max(epochs - 1, 1)
        ratio = 0.1 if self.ratio is None else self.ratio
        counted = epoch + (self.shift or 0)
        if self.step is not None:
            return ratio ** sum(counted >= at for at in self.step)
        if self.every is not None:
            return ratio ** (counted // self.every)
        if self.exponential is not None:
            return self.exponential**epoch
        if self.linear is not None:
            return 1 + (self.linear - 1) * done
        end = self.cosine or 0.0
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2


class TorchSchedule(Options):
    """A class of torch.optim.lr_scheduler; the fields are its arguments, and it steps after each epoch."""

    torch_class: ClassVar[type[LRScheduler]]
    _values: dict[Any, list[list[dict[str, Any]]]] = PrivateAttr(default_factory=dict)

    @property
    def changes_momentum(self) -> bool:
        return bool(getattr(self, "cycle_momentum", False))

    def values(self, build: Callable[[list[Any]], torch.optim.Optimizer], lrs: list[float], epoch: int, epochs: int):
        """What an optimizer's groups have in `epoch` of `epochs`: the learning rate, and momentum where it changes.

        The schedule runs from its beginning on a stand-in for the optimizer, so that it needs no state of its own.

        Args:
            build: gives an optimizer for groups of parameters.
            lrs: the learning rate that each group begins with.
        """
        key = (*lrs, epochs)
        if key not in self._values:
            try:
                self._values[key] = self._run(build, lrs, epochs)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ExperimentError(f"{self.where}: {self.kind}: {error}") from error
        return self._values[key][epoch]

    def _run(self, build: Callable[[list[Any]], torch.optim.Optimizer], lrs: list[float], epochs: int):
        optimizer = build([{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": lr} for lr in lrs])
        arguments = {name: getattr(self, name) for name in type(self).model_fields}
        scheduler = self.torch_class(optimizer, **arguments)
        changed = ("lr", "momentum", "betas") if self.changes_momentum else ("lr",)
        found = []
        for epoch in range(epochs):
            if epoch:
                optimizer.step()  # which torch expects before a scheduler's step
                scheduler.step()
            found.append([{key: group[key] for key in changed if key in group} for group in optimizer.param_groups])
        return found


CLOSURE = "a file holds no functions. Register an optimizer of your own, or use another schedule"
PARTS = "it consists of other schedulers, which a file cannot name here. Use one of them, or `step`"
registered.refused = {
    "LambdaLR": CLOSURE,
    "MultiplicativeLR": CLOSURE,
    "ChainedScheduler": PARTS,
    "SequentialLR": PARTS,
    "ReduceLROnPlateau": "it follows a measured cost, whose rounding depends on the number of ranks: so would the "
    "learning rate. Use `step` with the epochs at which it shall fall",
}
NOT_OF_A_FILE = ("self", "optimizer", "last_epoch", "verbose")


def _register(cls: type[LRScheduler]) -> None:
    # torch imports some of these for type checkers only; a file's list stands for any iterable.
    hints = get_type_hints(cls.__init__, localns={"Iterable": list, "Callable": Callable, "Literal": Literal})
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        kind = _plain(hints.get(name, Any))
        if name not in NOT_OF_A_FILE and kind is not None:
            fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    made = create_model(
        cls.__name__, __base__=TorchSchedule, __doc__=f"torch.optim.lr_scheduler.{cls.__name__}.", **fields
    )
    made.torch_class = cls
    registered.register(cls.__name__)(made)


def _plain(hint: Any) -> Any:
    """A type as values of a file have it: one number where torch also takes one for each group; None for functions."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        first = next((_plain(part) for part in parts if get_origin(part) is not list), None)
        return first if first is None or len(parts) == len(get_args(hint)) else first | None
    return None if get_origin(hint) is Callable else hint


for _name in lr_scheduler.__all__:
    _class = getattr(lr_scheduler, _name)
    if _name not in ("LRScheduler", *registered.refused) and issubclass(_class, LRScheduler):
        _register(_class)


def _known(given: Any) -> Any:
    if isinstance(given, str):  # `schedule: cosine`
        unknown = f"is unknown. {nearest(given, (*SHAPES, *registered))}"
        raise problem(f"{given!r} " + (f"needs a value, as {SHAPES[given]}" if given in SHAPES else unknown))
    return given


ScheduleField = Annotated[
    Any,
    ReferenceOrNested(registered, Schedule),
    BeforeValidator(_known),
    WithJsonSchema({"anyOf": [{DEFINITION: "schedule"}, {DEFINITION: "Schedule"}, {"type": "null"}]}),
]
