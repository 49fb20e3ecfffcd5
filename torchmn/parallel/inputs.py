"""The inputs of a parallel model's forward: what is found in them, and what ranks compare of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.digest import checksum_of, digest_of
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.geometry import owned
from torchmn.sharded.redistribute import part_of
from torchmn.sharded.sharding import Samples, Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.trees import leaves, leaves_of, map_only


def compare_forwards(
    comm: Communicator,
    model: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    inputs: Sequence[Tensor],
    told: Callable[[], tuple],
    others: tuple,
    parameters: Sequence[tuple[str, nn.Parameter]],
) -> None:
    """Raises MismatchError on every rank unless all are about to compute the same forward, and the same backward.

    Args:
        modules: of the model, with their names.
        told: returns, of each input, what ranks have in common.
        others: arguments that are no tensors.
        parameters: of the model, with their names.
    """
    training = model.training
    other_modes = [name for name, module in modules if module.training != training]
    gradients = "inference mode" if torch.is_inference_mode_enabled() else torch.is_grad_enabled()
    # What one rank alone has frozen, its backward does not reach: the others would wait for it there.
    same = {
        "mode": "training" if training else "evaluation",
        "modules in the other mode": tuple(other_modes),
        "gradients": gradients,
        "autocast": _autocast(inputs),
        "whole inputs": told,
        "other arguments": others,
        "frozen parameters": lambda: tuple([name for name, p in parameters if not p.requires_grad]),
    }
    comm.agree("forward of a parallel model", **same)


def _autocast(inputs: Sequence[Tensor]) -> torch.dtype | None:
    """What computations are cast to; None for nothing."""
    device = inputs[0].device.type if inputs else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def plain_values(leaves: Sequence[Any]) -> tuple:
    """Those arguments that a rank can compare with another's, and on which the path of a forward may depend."""
    return tuple(x for x in leaves if x is None or isinstance(x, bool | int | float | str))


# The values of whole inputs are compared up to here: ranks that shuffle differently differ from the first sample on.
_COMPARED_BYTES = 1 << 20
_REMEMBERED_LAYOUTS = 64
_REMEMBERED_SHAPES = 1024


Modules = Sequence[tuple[str, nn.Module]]
Parameters = Sequence[tuple[str, nn.Parameter]]


class Shards(NamedTuple):
    """The arguments of a forward, as this rank computes with them.

    Attributes:
        args, kwargs: images are sharded.
        inputs: the tensors among these.
        others: arguments that are no tensors, on which the path of a forward may depend.
        samples: which samples of the whole batch these are.
        batch: how many of them this rank has.
    """

    args: tuple
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    others: tuple
    samples: Samples
    batch: int

    def kind(self) -> tuple:
        """What a run without values of these arguments depends on."""
        shapes = [x.spec.shape if isinstance(x, ShardedTensor) else tuple(x.shape) for x in self.inputs]
        return (*shapes, *[x for x in self.others if x is None or isinstance(x, bool | str)])


class Inputs:
    """How the inputs of one parallel model are cut. `learned`: see `Sharding`."""

    def __init__(
        self,
        grid: ProcessGrid,
        cuts_images: bool,
        input_shape: tuple[int, ...] | None,
        learned: Mapping[int, Any],
    ):
        self.grid = grid
        self.cuts_images = cuts_images
        self.input_shape = input_shape
        self.learned = learned
        self._tiled: set[Any] = set()  # shapes of which ranks were seen to hold different tiles
        self._layouts: dict[Any, Sharding] = {}

    def shard(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], modules: Modules, parameters: Parameters
    ) -> Shards:
        """Returns this rank's part of the arguments.

        Raises:
            MismatchError: on every rank, unless all that share images are in the same forward of the same inputs.
        """
        only_tensors = are_only_tensors(args, kwargs)  # in most calls; and a walk is slow
        inputs = list(args) if only_tensors else leaves_of(Tensor, (args, kwargs))
        others = ()
        if len(inputs) < len(args) + len(kwargs):
            others = plain_values(leaves((args, kwargs)))
        tiles = self.grid.tiles
        if tiles.size > 1:

            def told() -> tuple:
                return tuple([self._told(x) for x in inputs])

            compare_forwards(tiles, model, modules, inputs, told, others, parameters)
        samples, batch = self._samples(model, inputs)
        if only_tensors:
            inputs = args = tuple([self._entered(x, samples) for x in inputs])
        else:
            args, kwargs = map_only(Tensor, lambda x: self._entered(x, samples), (args, kwargs))
            inputs = leaves_of(Tensor, (args, kwargs))
        return Shards(args, kwargs, inputs, others, samples, batch)

    def compare_whole(
        self,
        model: nn.Module,
        images: list[Tensor],
        labels: Tensor | None,
        modules: Modules,
        parameters: Parameters,
    ) -> None:
        """An error on every rank if those that share images are given different whole ones, or different labels."""
        if self.grid.tiles.size > 1:

            def told() -> tuple:
                return tuple(comparable(x) for x in (*images, *([] if labels is None else [labels])))

            compare_forwards(self.grid.tiles, model, modules, images, told, (), parameters)

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
            known = self._layouts[shape, samples] = image_layout(self.grid, shape, samples, self.learned)
        return known

    def _samples(self, model: nn.Module, inputs: list[Tensor]) -> tuple[Samples, int]:
        """Which samples of the whole batch this rank's replica holds; what other replicas hold is asked in training."""
        batch = 0
        for x in inputs:
            if x.dim():
                batch = x.spec.shape[0] if isinstance(x, ShardedTensor) else x.shape[0]
                break
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
            if len(self._tiled) >= _REMEMBERED_SHAPES:
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


def are_only_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call has the plainest form: tensors, one after the other."""
    for x in args:
        if not isinstance(x, Tensor):
            return False
    return not kwargs


def without_values(x: Tensor) -> Tensor:
    """A tensor, or part of one, that looks like `x`."""
    if isinstance(x, ShardedTensor):
        return wrap(torch.empty_like(local(x), device="meta").requires_grad_(x.requires_grad), x.spec)
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def comparable(x: Tensor) -> tuple[Any, ...]:
    """What ranks compare of a tensor that all of them have: its looks, and a number for its values."""
    values = wire.as_bytes(x.detach().cpu().contiguous())[:_COMPARED_BYTES]
    return (*x.shape, x.dtype, x.requires_grad, checksum_of(values))


def whole_shape(grid: ProcessGrid, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The global shape of an input of which the tile ranks hold `shapes`; an error if these do not fit together."""
    first = shapes[0]
    axes = grid.axes_of(len(first) - 2)
    shape = list(first)
    layout = Sharding(grid, first, (None,) * len(first), Samples(0, first[0]))
    for dim, axis in enumerate(axes, start=2):
        along = {layout.place(axis, tile): part[dim] for tile, part in enumerate(shapes) if len(part) == len(first)}
        shape[dim] = sum(along.values())
    expected = [
        (
            *first[:2],
            *(
                len(owned(shape[dim], grid.sizes[axis], layout.place(axis, tile)))
                for dim, axis in enumerate(axes, start=2)
            ),
        )
        for tile in range(len(shapes))
    ]
    if expected != shapes:
        raise ParallelizeError(
            f"rank {grid.comm.rank} of {grid.comm.size}: the ranks' tiles have shapes {shapes}, expected {expected} "
            f"for an input {tuple(shape)}: balanced, larger tiles first. torchmn.data.scatter_regions cuts them so."
        )
    return tuple(shape)
