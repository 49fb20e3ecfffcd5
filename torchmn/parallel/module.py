"""Parallelism: how a model runs on a grid of ranks, and the forward of a parallel model.

Forward cuts the inputs, traces the model on meta tensors once per kind of inputs, computes, and gathers the outputs.
"""

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
from torchmn.gradient_role import change_role, make_partial, role_of
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.parallel.events import ForwardEvent, OutputEvent, SamplesEvent, TraceGuard, announce
from torchmn.parallel.functional_call import ParameterSlots, check_registered, compare_replaced
from torchmn.parallel.inputs import InputKind, Inputs, ShardedArguments, TracedKinds, as_meta
from torchmn.parallel.passes import model_pass
from torchmn.parallel.serial_semantics import SerialSemantics
from torchmn.parallel.trace import dry_run, explain, run_with_batch
from torchmn.sharded.redistribute import whole
from torchmn.sharded.sharding import Samples, computing_samples
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.trees import map_only


@dataclass
class Parallelism:
    """How a model runs on a grid; an attribute of the model, `model.parallelism`.

    Attributes:
        grid: the ranks.
        mode: "datapar", "modelpar", "halopar" or "halodatapar".
        cuts_images: whether images are cut into tiles.
        output: "whole" or "tile".
        input_shape: of one sample, if the user gave it.
        roles: name of a parameter -> placement of its gradient, as in `GradientRole`.
        learned: name of a parameter -> data of an optional pass.
        guard_counts: name of a guard -> how often it checked this model, for guards that check the first few times.
    """

    grid: ProcessGrid
    mode: str
    cuts_images: bool
    output: str = "whole"
    input_shape: tuple[int, ...] | None = None
    roles: dict[str, str] = field(default_factory=dict)
    learned: dict[str, Any] = field(default_factory=dict)
    guard_counts: Counter[str] = field(default_factory=Counter)
    _traced: TracedKinds = field(default_factory=TracedKinds)
    _marked_model: Any = None  # weak reference to the model whose parameters have their roles
    _frozen: list[nn.Parameter] = field(default_factory=list)  # get their role when they require a gradient
    # Of the marked model:
    _slots: ParameterSlots | None = None
    _named_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    _parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _learned: dict[int, Any] = field(default_factory=dict)  # `learned` by the ids of its parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelism:
        copied = Parallelism(self.grid, self.mode, self.cuts_images, self.output, self.input_shape, dict(self.roles))
        copied.learned = deepcopy(self.learned)
        memo[id(self)] = copied
        return copied

    # -- one forward -------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the output of the forward of `model`, computed by all ranks of the grid."""
        announce("forward", ForwardEvent(model, self, args, kwargs))
        self._update_roles(model)
        sharded = self.inputs.shard(model, args, kwargs, self._named_modules, self._parameters)
        self._trace_once(model, sharded)
        with sharded.operations:
            result = self._compute(model, sharded.args, sharded.kwargs, sharded.samples, sharded.batch)
        announce("output", OutputEvent(model, self, result))
        return result

    @cached_property
    def inputs(self) -> Inputs:
        """How inputs are cut."""
        return Inputs(self.grid, self.cuts_images, self.input_shape, self._learned)

    def compare_whole(self, model: nn.Module, images: list[Tensor], labels: Tensor | None = None) -> None:
        """Raises a MismatchError on every rank if ranks that share images have different whole images or labels."""
        self.inputs.compare_whole(model, images, labels, self._named_modules, self._parameters)

    def _compute(self, model: nn.Module, args: tuple, kwargs: dict, samples: Samples, batch: int) -> Any:
        with computing_samples(samples):
            forward = model_pass().forward_of(model)
            if self.grid.comm.size > 1:  # in evaluation too: Monte Carlo dropout, F.dropout(x) without training=
                with SerialSemantics(self.grid, samples, batch):
                    result = forward(model, *args, **kwargs)
            else:
                result = forward(model, *args, **kwargs)
        leave = whole if self.output == "whole" else _tile
        return leave(result) if isinstance(result, ShardedTensor) else map_only(ShardedTensor, leave, result)

    # -- before the first forward --------------------------------------------------------------------------------

    def _trace_once(self, model: nn.Module, sharded: ShardedArguments) -> None:
        """Traces the model on meta tensors for new kinds of inputs; raises an error if it cannot be computed."""
        if self.mode == "datapar" and self.grid.sizes["data"] > 1:
            kind = InputKind((model.training, *[x.dim() for x in sharded.inputs], *sharded.options()), 0, ())
            if kind not in self._traced:  # whatever the shapes: without tiles and slices nothing else depends on them
                self._traced.add(kind)
                args, kwargs = map_only(Tensor, as_meta, (sharded.args, sharded.kwargs))
                self._announce_samples(model, args, kwargs, sharded.batch)
        replaced = self._slots.replaced() if self._slots is not None else {}
        if self.cuts_images or self.mode == "modelpar":
            with self._slots.restored() if replaced and self._slots is not None else nullcontext():
                self._trace(model, sharded)
        if replaced and self.grid.tiles.size > 1:  # after the trace, which finds the slices: these differ between ranks
            not_sliced = {name: x for name, x in replaced.items() if self.roles.get(name) != "shard"}
            compare_replaced(self.grid.tiles, not_sliced)

    def _trace(self, model: nn.Module, sharded: ShardedArguments) -> None:
        kind = sharded.kind(model.training)
        if kind in self._traced:
            return
        args, kwargs = map_only(Tensor, as_meta, (sharded.args, sharded.kwargs))

        def learn() -> bool:
            return self.learn_roles(model, args, kwargs, sharded.samples, sharded.batch)

        reads_shapes = self.grid.tiles.attempt("dry run of a parallel model", learn, raises=ParallelizeError)
        self._traced.add(kind, any(reads_shapes))

    def learn_roles(self, model: nn.Module, args: tuple, kwargs: dict, samples: Samples, batch: int) -> bool:
        """Finds the gradient roles of the parameters in a dry run, and sets them.

        Args:
            args, kwargs: meta tensors.
            samples: which samples of the global batch these represent.
            batch: how many.

        Returns:
            Whether the user's code in forward has read the shape of a tensor, so that its path may depend on it.

        Raises:
            ParallelizeError: if the model cannot be computed on this grid, or uses parameters in another way than in
                earlier dry runs.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._compute(model, args, kwargs, samples, batch)

        try:
            recorder = dry_run(model, forward, args, kwargs)
        except Exception as error:
            raise explain(error) from (None if isinstance(error, ParallelizeError) else error)
        self._announce_samples(model, args, kwargs, batch)
        found = dict.fromkeys(recorder.used_whole, "replicate") | dict.fromkeys(recorder.used_sharded, "partial")
        for name in recorder.used_sharded:
            if name in recorder.used_whole or role_of(model.get_parameter(name)).summed_in_backward:
                found[name] = "replicate"
                change_role(model.get_parameter(name), summed_in_backward=True)
        found |= dict.fromkeys(sliced_parameters(model), "shard")
        changed = [name for name, role in found.items() if self.roles.get(name, role) != role]
        if changed:
            raise ParallelizeError(
                f"the parameters {', '.join(changed)} are used in another way than the model was parallelized for. "
                "Pass parallelize(..., input_shape=...) with the shape of these inputs."
            )
        model_pass().learn(recorder, self.learned)
        new = found.keys() - self.roles.keys()  # training may use other parameters than evaluation
        self.roles |= found
        self._set_roles(model, new)
        return recorder.reads_shapes

    def _announce_samples(self, model: nn.Module, args: tuple, kwargs: dict, batch: int) -> None:
        if self.grid.sizes["data"] == 1:
            return

        def run(size: int, guard: TraceGuard) -> None:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return self._compute(model, args, kwargs, Samples(0, size), size)

            run_with_batch(model, forward, args, kwargs, (batch, size), guard)

        announce("samples", SamplesEvent(model, self, run))

    # -- gradient roles ------------------------------------------------------------------------------------------

    def _update_roles(self, model: nn.Module) -> None:
        """Sets the roles of a deep copy's parameters, and of those that require a gradient since the last forward."""
        if self._marked_model is None or self._marked_model() is not model:
            self.adopt(model)
        if self._frozen:
            for parameter in self._frozen:
                if parameter.requires_grad:
                    make_partial(parameter, self.grid.tile_count)
            self._frozen = [p for p in self._frozen if not p.requires_grad]

    def adopt(self, model: nn.Module) -> None:
        """Sets the roles of parameters that were added later: those of a deep copy, and of replaced layers."""
        if self._marked_model is None or self._marked_model() is not model:
            check_registered(model)
            self._frozen = []
            self._set_roles(model)  # a deep copy of a parameter has no role
        new = {name for name, p in model.named_parameters() if not role_of(p).known}
        if new:  # the next forward begins with a dry run, which finds their roles
            self._traced.clear()
            self.roles = {name: role for name, role in self.roles.items() if name not in new}
        for name in sliced_parameters(model):  # the optimizer needs these before the first forward
            change_role(model.get_parameter(name), placement="shard", over=self.grid.replicas)
        self._store_parameters(model)

    def _set_roles(self, model: nn.Module, names: Set[str] | None = None) -> None:
        """Sets the roles of these parameters, and of those without one; by default of all."""
        for name, parameter in model.named_parameters():
            is_due = names is None or name in names or not role_of(parameter).known
            role = self.roles.get(name) if is_due else None
            if role == "shard":
                change_role(parameter, placement="shard", over=self.grid.replicas)
            elif role == "partial" and not parameter.requires_grad:
                self._frozen.append(parameter)
            elif role == "partial":
                make_partial(parameter, self.grid.tile_count)
            change_role(parameter, known=True)
            is_complete = self.roles.get(name) == "shard" and self.grid.replicas.size == 1
            change_role(parameter, needs_mean=self.grid.comm.size > 1 and not is_complete)
        self._marked_model = weakref.ref(model)
        self._store_parameters(model)

    def _store_parameters(self, model: nn.Module) -> None:
        self._slots, self._parameters = ParameterSlots(model), list(model.named_parameters())
        self._named_modules = list(model.named_modules())
        self._learned.clear()
        self._learned.update({id(p): self.learned[name] for name, p in self._parameters if name in self.learned})


def parallelism_of(model: nn.Module) -> Parallelism | None:
    """Returns how a model is parallel; None if it did not go through `parallelize`."""
    return getattr(model, "parallelism", None)


def sliced_parameters(model: nn.Module) -> list[str]:
    """Returns the names of the parameters of which each rank of `grid.tiles` holds a slice."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, SlicedModule)
        for name in module.sliced_parameters
    ]


def _tile(x: ShardedTensor) -> Tensor:
    """Returns this rank's tile as a plain dense tensor, which `view` can give another shape."""
    tile = local(x)
    dense = tile.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tile)  # the first check is faster
    return tile if dense else tile.clone()
