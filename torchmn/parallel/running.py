"""What happens around the forward of a parallel model: inputs become parts, outputs become what the user wants."""

from __future__ import annotations

import weakref
from collections.abc import Set
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchmn.communicators.digests import digest_of
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.gradient_role import change_role, let_be_partial, role_of
from torchmn.nn.slices import SlicedModule
from torchmn.parallel.agreement import SameLoss, compare_forwards, plain_values
from torchmn.parallel.compiled import refuse_compiled_submodules
from torchmn.parallel.dry_run import dry_run, explained
from torchmn.parallel.given_parameters import OwnParameters, check_own, compare_given
from torchmn.parallel.guard import guard
from torchmn.parallel.inputs import (
    are_only_tensors,
    check_others,
    comparable,
    tensors_in,
    whole_shape,
    without_values,
)
from torchmn.parallel.own_averages import compare_buffers
from torchmn.parallel.randomness import SerialRandomness
from torchmn.parallel.tracing import refuse_tracing
from torchmn.sharded.passes import model_pass
from torchmn.sharded.redistribute import part_of, whole
from torchmn.sharded.sharding import Samples, Sharding, forward_of, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap

_REMEMBERED_LAYOUTS = 64
_REMEMBERED_CHECKS = 1024
_WATCHED_LOSSES = 4  # ranks that shuffle differently do so from the first batch on
_COMPARED_BUFFERS = 2  # forwards; what is computed of one rank's samples differs from the first on


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
    _checked: set[Any] = field(default_factory=set)
    _tiled: set[Any] = field(default_factory=set)  # shapes of which ranks were seen to hold different tiles
    _layouts: dict[Any, Sharding] = field(default_factory=dict)
    _marked: Any = None  # the model whose parameters carry the marks of their roles
    _frozen: list[nn.Parameter] = field(default_factory=list)  # need no gradient now; marked when they do
    _unwatched: int = _WATCHED_LOSSES  # so many losses are still to be compared
    _uncompared: int = _COMPARED_BUFFERS  # so many forwards are still to be followed by a comparison of buffers
    _own: OwnParameters | None = None  # where the marked model keeps its parameters
    _parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)  # of the marked model, by name

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelism:
        copied = Parallelism(self.grid, self.mode, self.cuts_images, self.output, self.input_shape, dict(self.roles))
        copied.learned = deepcopy(self.learned)
        memo[id(self)] = copied
        return copied

    # -- one forward -------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward of `model` on this rank's part of the inputs."""
        if self.mode != "datapar" or (self.grid.comm.size > 1 and model.training):
            refuse_tracing(args if not kwargs else pytree.tree_leaves((args, kwargs)))
        if self._marked is None or self._marked() is not model:
            self.adopt(model)
        if self._frozen:
            self._mark_unfrozen()
        inputs = tensors_in(args, kwargs)
        others = ()
        if len(inputs) < len(args) + len(kwargs):
            if self.cuts_images:
                check_others(args, kwargs)
            others = plain_values(pytree.tree_leaves((args, kwargs)))
        self._compare(model, inputs, others)
        given = self._own.replaced() if self._own is not None else {}
        samples, batch = self._samples(model, inputs)
        if are_only_tensors(args, kwargs):  # pytree is slow, and most models have one input
            args = tuple([self._entered(x, samples) for x in inputs])
        else:
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: self._entered(x, samples), (args, kwargs))
        with self._own.back() if given and self._own is not None else nullcontext():
            self._check(model, args, kwargs, others, samples, batch)
        if given:  # now the roles are known: slices differ between ranks
            self._compare_given(given)
        result = self._computed(model, args, kwargs, samples, batch)
        if self._unwatched and self.output == "whole" and model.training:
            self._watch_loss(result)
        if self._uncompared and model.training:
            self._watch_buffers(model)
        return result

    def _watch_loss(self, result: Any) -> None:
        """Let the first losses be compared in backward, while a mistake still costs nothing."""
        tiles = self.grid.tiles
        # Not a parameter that the model returns, whose gradient is a rank's own share.
        learning = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]
        if tiles.size > 1 and learning:
            self._unwatched -= 1
            for x in learning:
                x.register_hook(SameLoss(tiles))

    def _watch_buffers(self, model: nn.Module) -> None:
        """Compare what the first forwards leave in buffers, along data, where ranks have samples of their own."""
        replicas = self.grid.replicas
        self._uncompared -= 1
        if replicas.size > 1:
            compare_buffers(replicas, model)

    def _computed(self, model: nn.Module, args: tuple, kwargs: dict, samples: Samples, batch: int) -> Any:
        with forward_of(samples):
            forward = model_pass().forward_of(model)
            if self.grid.comm.size > 1:  # in evaluation too: F.dropout(x) drops out, and Monte Carlo dropout is wanted
                with SerialRandomness(self.grid, samples, batch):
                    result = forward(model, *args, **kwargs)
            else:
                result = forward(model, *args, **kwargs)
        leave = whole if self.output == "whole" else _tile
        return (
            leave(result) if isinstance(result, ShardedTensor) else pytree.tree_map_only(ShardedTensor, leave, result)
        )

    def _compare(self, model: nn.Module, inputs: list[Tensor], others: tuple) -> None:
        """An error on every rank if the ranks that share images are not in the same forward of the same inputs."""
        tiles = self.grid.tiles
        if tiles.size > 1:

            def told() -> tuple:
                return tuple([self._told(x) for x in inputs])

            compare_forwards(tiles, model.training, inputs, told, others, self._parameters)

    def _compare_given(self, given: dict[str, Any]) -> None:
        tiles = self.grid.tiles
        if tiles.size > 1:
            compare_given(tiles, {name: x for name, x in given.items() if self.roles.get(name) != "shard"})

    def compare_whole(self, model: nn.Module, images: list[Tensor], labels: Tensor | None = None) -> None:
        """An error on every rank if those that share images are given different whole ones, or different labels."""
        if self.grid.tiles.size > 1:

            def told() -> tuple:
                return tuple(comparable(x) for x in (*images, *([] if labels is None else [labels])))

            compare_forwards(self.grid.tiles, model.training, images, told, (), self._parameters)

    def _told(self, x: Tensor) -> tuple[Any, ...]:
        """What ranks that share images have in common of an input: of whole ones, the values."""
        if isinstance(x, ShardedTensor):
            return ("part", *x.spec.shape)
        if self.cuts_images and x.dim() > 2 and not self._is_whole(x):
            return ("tile", x.shape[0], x.dim(), x.dtype, x.requires_grad)
        return comparable(x)

    def _is_whole(self, x: Tensor) -> bool:
        """Whether an image is given whole; False too where the first rank's tile is all of it."""
        if tuple(x.shape[1:]) != self.input_shape:
            return False
        first = self._layout(tuple(x.shape), Samples(0, x.shape[0])).local_shape(tile=0)
        return first != tuple(x.shape)

    def _layout(self, shape: tuple[int, ...], samples: Samples) -> Sharding:
        """The layout of an input: the same object for the same numbers, with all that rules have worked out for it."""
        known = self._layouts.get((shape, samples))
        if known is None:
            if len(self._layouts) >= _REMEMBERED_LAYOUTS:
                self._layouts.clear()  # shapes that never repeat must not fill the memory
            known = self._layouts[shape, samples] = image_layout(self.grid, shape, samples)
        return known

    def _samples(self, model: nn.Module, inputs: list[Tensor]) -> tuple[Samples, int]:
        """Which samples of the whole batch this rank's replica holds; what other replicas hold is asked in training."""
        first = next((x for x in inputs if x.dim()), None)
        batch = 0 if first is None else first.spec.shape[0] if isinstance(first, ShardedTensor) else first.shape[0]
        replicas = self.grid.replicas
        if replicas.size == 1 or not model.training:
            return Samples(0, batch, known=replicas.size == 1), batch
        sizes = [int(n) for n in replicas.allgather(torch.tensor(batch))]
        return Samples(sum(sizes[: replicas.rank]), sum(sizes)), batch

    def _entered(self, x: Tensor, samples: Samples) -> Tensor:
        """An input as a ShardedTensor, if images are cut and it is one."""
        if not self.cuts_images or isinstance(x, ShardedTensor) or x.dim() < 3:
            return x
        shape = self._global_shape(x)
        layout = self._layout(shape, samples)
        if tuple(x.shape) == layout.local_shape():
            return wrap(x, layout)
        if tuple(x.shape) == shape:
            return part_of(x, layout)
        raise ParallelizeError(
            f"rank {self.grid.comm.rank} of {self.grid.comm.size}: expected this rank's tile {layout.local_shape()} of "
            f"an input {shape}, or all of it, got {tuple(x.shape)}. torchmn.data.scatter_regions gives each rank its "
            "tile."
        )

    def _global_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the whole input: as the user said, or from the shapes of all ranks' tiles."""
        if self.input_shape is not None and len(self.input_shape) == x.dim() - 1:
            return (x.shape[0], *self.input_shape)
        tiles = self.grid.tiles
        shapes = [tuple(part.tolist()) for part in tiles.allgather(torch.tensor(x.shape))]
        shape = whole_shape(self.grid, shapes)
        if tiles.size > 1 and shape not in self._tiled:
            self._check_differs(x, shape)
            if len(self._tiled) >= _REMEMBERED_CHECKS:
                self._tiled.clear()
            self._tiled.add(shape)
        return shape

    def _check_differs(self, x: Tensor, shape: tuple[int, ...]) -> None:
        """An error if all ranks hold the same values: these are whole images, and no tiles of one of `shape`."""
        values = x.detach().cpu().contiguous()
        digest = digest_of((values,))
        constant = x.numel() == 0 or bool((values == values.view(-1)[0]).all())
        if len(set(self.grid.tiles.allgather_obj(digest))) == 1 and not constant:
            raise ParallelizeError(
                f"rank {self.grid.comm.rank} of {self.grid.comm.size}: every rank passed the same {tuple(x.shape)}, as "
                f"if it were its tile of {shape}. If these are whole images, say so: parallelize(..., "
                f"input_shape={tuple(x.shape[1:])}); if they are tiles: input_shape={shape[1:]}."
            )

    # -- before the first forward --------------------------------------------------------------------------------

    def _check(self, model: nn.Module, args: tuple, kwargs: dict, others: tuple, samples: Samples, batch: int) -> None:
        """Run once without values for every new shape of the inputs: what can not be computed raises here."""
        if not (self.cuts_images or self.mode == "modelpar"):
            return
        inputs = tensors_in(args, kwargs)
        shapes = [x.spec.shape if isinstance(x, ShardedTensor) else tuple(x.shape) for x in inputs]
        flags = [x for x in others if x is None or isinstance(x, bool | str)]  # the model's path may depend on them
        seen = (model.training, *shapes, *flags)
        if seen in self._checked:
            return
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, without_values, (args, kwargs))

        def look() -> None:
            refuse_compiled_submodules(model)
            self.learn_roles(model, meta_args, meta_kwargs, samples, batch)

        self.grid.tiles.attempt("dry run of a parallel model", look, raises=ParallelizeError)
        if len(self._checked) >= _REMEMBERED_CHECKS:
            self._checked.clear()
        self._checked.add(seen)

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
        model_pass().learn(model, recorder, self.learned)
        new = found.keys() - self.roles.keys()  # training may use others than evaluation
        self.roles |= found
        self.mark(model, new)

    def adopt(self, model: nn.Module) -> None:
        """Let parameters that came later know their roles: those of a deep copy, and of layers that were put in."""
        if self._marked is None or self._marked() is not model:
            check_own(model)
            self._frozen = []
            self.mark(model)  # a deep copy has the parameters, but not their marks
        new = {name for name, p in model.named_parameters() if not role_of(p).known}
        if new:  # the next forward begins with a run without values, which finds their roles
            self._checked.clear()
            self.roles = {name: role for name, role in self.roles.items() if name not in new}
        self.mark_own(model)
        self._own, self._parameters = OwnParameters(model), list(model.named_parameters())

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
        model_pass().adopt(model, self.learned)
        for name, parameter in model.named_parameters():
            if self.grid.comm.size > 1 and not (self.roles.get(name) == "shard" and self.grid.replicas.size == 1):
                guard(parameter)
        self._marked, self._parameters = weakref.ref(model), list(model.named_parameters())
        self._own = OwnParameters(model)

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
