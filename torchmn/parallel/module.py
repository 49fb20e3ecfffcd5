"""What happens around the forward of a parallel model: inputs become parts, outputs become what the user wants."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Set
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.gradient_role import change_role, let_be_partial, role_of
from torchmn.nn.layers.slices import SlicedModule
from torchmn.parallel.events import Forward, Output, announce
from torchmn.parallel.functional_call import OwnParameters, check_own, compare_given
from torchmn.parallel.inputs import Inputs, Shards, without_values
from torchmn.parallel.passes import model_pass
from torchmn.parallel.serial_semantics import SerialRandomness
from torchmn.parallel.trace import dry_run, explained
from torchmn.sharded.redistribute import whole
from torchmn.sharded.sharding import Samples, forward_of
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.trees import map_only

_REMEMBERED = 1024  # kinds of inputs


@dataclass
class Parallelism:
    """How a model runs on a grid. It hangs on the model as `model.parallelism`."""

    grid: ProcessGrid
    mode: str
    cuts_images: bool
    output: str = "whole"
    input_shape: tuple[int, ...] | None = None  # of one sample, if the user gave it
    roles: dict[str, str] = field(default_factory=dict)
    learned: dict[str, Any] = field(default_factory=dict)  # by a pass, of parameters by their names
    looks: Counter[str] = field(default_factory=Counter)  # how often guards have looked at something
    _traced: set[Any] = field(default_factory=set)  # what the run without values has seen
    _marked: Any = None  # the model whose parameters carry the marks of their roles
    _frozen: list[nn.Parameter] = field(default_factory=list)  # need no gradient now; marked when they do
    _own: OwnParameters | None = None  # where the marked model keeps its parameters
    _named_modules: list[tuple[str, nn.Module]] = field(default_factory=list)  # of the marked model, by name
    _parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)  # of the marked model, by name
    _learned: dict[int, Any] = field(default_factory=dict)  # the same as `learned`, by the ids of `_parameters`

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelism:
        copied = Parallelism(self.grid, self.mode, self.cuts_images, self.output, self.input_shape, dict(self.roles))
        copied.learned = deepcopy(self.learned)
        memo[id(self)] = copied
        return copied

    # -- one forward -------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns what the forward of `model` gives, computed by all ranks of the grid."""
        announce("forward", Forward(model, self, args, kwargs))
        self._meet(model)
        shards = self.inputs.shard(model, args, kwargs, self._named_modules, self._parameters)
        self._trace_once(model, shards)
        result = self._computed(model, shards.args, shards.kwargs, shards.samples, shards.batch)
        announce("output", Output(model, self, result))
        return result

    @cached_property
    def inputs(self) -> Inputs:
        """How inputs are cut."""
        return Inputs(self.grid, self.cuts_images, self.input_shape, self._learned)

    def compare_whole(self, model: nn.Module, images: list[Tensor], labels: Tensor | None = None) -> None:
        """An error on every rank if those that share images are given different whole ones, or different labels."""
        self.inputs.compare_whole(model, images, labels, self._named_modules, self._parameters)

    def _computed(self, model: nn.Module, args: tuple, kwargs: dict, samples: Samples, batch: int) -> Any:
        with forward_of(samples):
            forward = model_pass().forward_of(model)
            if self.grid.comm.size > 1:  # in evaluation too: F.dropout(x) drops out, and Monte Carlo dropout is wanted
                with SerialRandomness(self.grid, samples, batch):
                    result = forward(model, *args, **kwargs)
            else:
                result = forward(model, *args, **kwargs)
        leave = whole if self.output == "whole" else _tile
        return leave(result) if isinstance(result, ShardedTensor) else map_only(ShardedTensor, leave, result)

    # -- before the first forward --------------------------------------------------------------------------------

    def _trace_once(self, model: nn.Module, shards: Shards) -> None:
        """Runs the model once without values for every new shape of inputs: what cannot be computed raises here."""
        given = self._own.replaced() if self._own is not None else {}
        if self.cuts_images or self.mode == "modelpar":
            with self._own.back() if given and self._own is not None else nullcontext():
                self._trace(model, shards)
        if given and self.grid.tiles.size > 1:  # now the roles are known: slices differ between ranks
            compare_given(self.grid.tiles, {name: x for name, x in given.items() if self.roles.get(name) != "shard"})

    def _trace(self, model: nn.Module, shards: Shards) -> None:
        seen = (model.training, *shards.kind())
        if seen in self._traced:
            return
        args, kwargs = map_only(Tensor, without_values, (shards.args, shards.kwargs))

        def look() -> None:
            self.learn_roles(model, args, kwargs, shards.samples, shards.batch)

        self.grid.tiles.attempt("dry run of a parallel model", look, raises=ParallelizeError)
        if len(self._traced) >= _REMEMBERED:
            self._traced.clear()
        self._traced.add(seen)

    def learn_roles(self, model: nn.Module, args: tuple, kwargs: dict, samples: Samples, batch: int) -> None:
        """Find out from a run without values which gradient each parameter will hold."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._computed(model, args, kwargs, samples, batch)

        try:
            recorder = dry_run(model, forward, args, kwargs)
        except Exception as error:
            raise explained(error) from (None if isinstance(error, ParallelizeError) else error)
        found = dict.fromkeys(recorder.with_whole, "replicate") | dict.fromkeys(recorder.with_parts, "partial")
        for name in recorder.with_parts:
            if name in recorder.with_whole or role_of(model.get_parameter(name)).summed_in_backward:
                found[name] = "replicate"
                change_role(model.get_parameter(name), summed_in_backward=True)
        found |= dict.fromkeys(own_parameters(model), "shard")
        changed = [name for name, role in found.items() if self.roles.get(name, role) != role]
        if changed:
            raise ParallelizeError(
                f"the parameters {', '.join(changed)} are used in another way than the model was parallelized for. "
                "Pass parallelize(..., input_shape=...) with the shape of these inputs."
            )
        model_pass().learn(recorder, self.learned)
        new = found.keys() - self.roles.keys()  # training may use others than evaluation
        self.roles |= found
        self.mark(model, new)

    def _meet(self, model: nn.Module) -> None:
        """Lets the parameters of a model that is not known yet, and those that need a gradient since, get roles."""
        if self._marked is None or self._marked() is not model:
            self.adopt(model)
        if self._frozen:
            self._mark_unfrozen()

    def adopt(self, model: nn.Module) -> None:
        """Let parameters that came later know their roles: those of a deep copy, and of layers that were put in."""
        if self._marked is None or self._marked() is not model:
            check_own(model)
            self._frozen = []
            self.mark(model)  # a deep copy has the parameters, but not their marks
        new = {name for name, p in model.named_parameters() if not role_of(p).known}
        if new:  # the next forward begins with a run without values, which finds their roles
            self._traced.clear()
            self.roles = {name: role for name, role in self.roles.items() if name not in new}
        self.mark_own(model)
        self._keep_parameters(model)

    def _mark_unfrozen(self) -> None:
        """A parameter that needs no gradient can not be marked; one that needs it since can."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                let_be_partial(parameter, self.grid.tile_count)
        self._frozen = [p for p in self._frozen if not p.requires_grad]

    def mark(self, model: nn.Module, names: Set[str] | None = None) -> None:
        """Let every parameter, or those of `names`, know its role: so gradients are combined over the right ranks."""
        for name, parameter in model.named_parameters():
            is_due = names is None or name in names or not role_of(parameter).known
            role = self.roles.get(name) if is_due else None
            if role == "shard":
                change_role(parameter, placement="shard", over=self.grid.replicas)
            elif role == "partial" and not parameter.requires_grad:
                self._frozen.append(parameter)
            elif role == "partial":
                let_be_partial(parameter, self.grid.tile_count)
            change_role(parameter, known=True)
            is_whole = self.roles.get(name) == "shard" and self.grid.replicas.size == 1
            change_role(parameter, needs_mean=self.grid.comm.size > 1 and not is_whole)
        self._marked = weakref.ref(model)
        self._keep_parameters(model)

    def _keep_parameters(self, model: nn.Module) -> None:
        self._own, self._parameters = OwnParameters(model), list(model.named_parameters())
        self._named_modules = list(model.named_modules())
        self._learned.clear()
        self._learned.update({id(p): self.learned[name] for name, p in self._parameters if name in self.learned})

    def mark_own(self, model: nn.Module) -> None:
        """Mark the slices, which an optimizer must know of before the first forward."""
        for name in own_parameters(model):
            change_role(model.get_parameter(name), placement="shard", over=self.grid.replicas)


def own_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of which every tile rank holds its own slice."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, SlicedModule)
        for name in module.cut_parameters
    ]


def _tile(x: ShardedTensor) -> Tensor:
    """The plain tensor that a ShardedTensor holds, in memory of its own: users may view it in another shape."""
    tile = local(x)
    dense = tile.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tile)  # the first is the quicker one
    return tile if dense else tile.clone()
