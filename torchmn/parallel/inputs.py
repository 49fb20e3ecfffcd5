"""Inputs: finds and cuts the images among the arguments of a parallel forward, and compares them between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.digest import checksum_of, digest_of
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.communicators.repeated_operations import RepeatedOperations
from torchmn.errors import ParallelizeError
from torchmn.geometry import owned
from torchmn.sharded.redistribute import shard_of
from torchmn.sharded.sharding import Samples, Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.trees import leaves, leaves_of, map_only

# So much of the values of whole inputs is compared: ranks that shuffle differently differ in the first sample already.
_COMPARED_BYTES = 1 << 20
_MOST_LAYOUTS = 64  # in the caches
_MOST_SHAPES = 1024
_MOST_TRACED = 1024  # kinds of inputs that need no dry run
_LARGEST_GROWTH = 2

Modules = Sequence[tuple[str, nn.Module]]
Parameters = Sequence[tuple[str, nn.Parameter]]


class InputKind(NamedTuple):
    """What the path of a forward may depend on: `batch` samples, images with `extents`, and everything else."""

    others: tuple
    batch: int
    extents: tuple[int, ...]


class TracedKinds:
    """The kinds of inputs for which a dry run was made, and those that need none because of these.

    If a forward reads no shape, its path is the same for any number of samples. A window fits into a larger image if it
    fits into a smaller one, and a halo that was found for an image serves one of up to twice its size. So trainings on
    images of many sizes make few dry runs. A forward that reads a shape gets a dry run for each shape.
    """

    def __init__(self) -> None:
        self._known: set[InputKind] = set()
        self._extents: dict[tuple, list[tuple[int, ...]]] = {}  # of dry runs whose forward read no shape

    def __contains__(self, kind: InputKind) -> bool:
        if kind in self._known:
            return True
        for traced in self._extents.get(kind.others, ()):
            if all(old <= new <= _LARGEST_GROWTH * old for old, new in zip(traced, kind.extents, strict=True)):
                self._remember(kind)
                return True
        return False

    def add(self, kind: InputKind, reads_shapes: bool = False) -> None:
        """Records a dry run, and whether the user's code in it has read the shape of a tensor."""
        self._remember(kind)
        if not reads_shapes:
            self._extents.setdefault(kind.others, []).append(kind.extents)

    def clear(self) -> None:
        self._known.clear()
        self._extents.clear()

    def _remember(self, kind: InputKind) -> None:
        if len(self._known) >= _MOST_TRACED:
            self.clear()  # shapes that never repeat must not fill the memory
        self._known.add(kind)


class ShardedArguments(NamedTuple):
    """The arguments of a forward as this rank computes with them.

    Attributes:
        args, kwargs: with ShardedTensors in place of images.
        inputs: the tensors among these.
        plain_arguments: arguments that are not tensors, on which the path of a forward may depend.
        samples: which samples of the global batch these are.
        batch: how many of them this rank has.
        operations: what ranks have compared in the last forward with such arguments.
    """

    args: tuple
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    plain_arguments: tuple
    samples: Samples
    batch: int
    operations: RepeatedOperations

    def kind(self, training: bool) -> InputKind:
        """Returns the values on which the result of a dry run may depend.

        `squeeze` and broadcasting treat one sample differently, so `others` has that number.
        """
        shapes, extents = [], []
        for x in self.inputs:
            is_image = isinstance(x, ShardedTensor)
            shape = x.spec.shape if is_image else tuple(x.shape)
            if shape and shape[0] == self.batch > 1:
                shape = (-1, *shape[1:])
            shapes.append((*shape[:2], len(shape)) if is_image else shape)
            extents += shape[2:] if is_image else ()
        return InputKind((training, *shapes, *self.options()), self.batch, tuple(extents))

    def options(self) -> list[bool | str | None]:
        """Returns the arguments that select a path of the forward."""
        return [x for x in self.plain_arguments if x is None or isinstance(x, bool | str)]


class Inputs:
    """Cuts the inputs of one parallel model.

    Args:
        grid: the ranks.
        cuts_images: whether images are cut into tiles.
        input_shape: of one sample, if the user gave it.
        learned: as in `Sharding`.
    """

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
        self._checked: set[Any] = set()  # global shapes of which ranks were found to hold different tiles
        self._layouts: dict[Any, Sharding] = {}
        self._operations: dict[Any, RepeatedOperations] = {}

    def shard(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], modules: Modules, parameters: Parameters
    ) -> ShardedArguments:
        """Returns the arguments with images cut.

        Args:
            model: the parallel model.
            args, kwargs: of its forward.
            modules: of the model, with their names.
            parameters: of the model, with their names.

        Raises:
            MismatchError: on every rank, if ranks that share images are in different forwards or have different
                inputs.
        """
        only_tensors = are_only_tensors(args, kwargs)  # the usual case, without a slow search in nested containers
        inputs = list(args) if only_tensors else leaves_of(Tensor, (args, kwargs))
        plain_arguments = ()
        if len(inputs) < len(args) + len(kwargs):
            plain_arguments = plain_values(leaves((args, kwargs)))
        tiles, operations = self.grid.tiles, self._operations_of(model, inputs, plain_arguments)
        operations.known = operations.number != 0
        if tiles.size > 1:

            def summaries() -> tuple:
                return tuple([self._summary(x) for x in inputs])

            number = operations.number
            numbers = compare_forwards(
                tiles, model, modules, inputs, summaries, plain_arguments, parameters, operations.number
            )
            operations.known = number != 0 and numbers.count(number) == len(numbers)
        samples, batch = self._samples(model, inputs, operations)
        if only_tensors:
            inputs = args = tuple([self._shard(x, samples) for x in inputs])
        else:
            args, kwargs = map_only(Tensor, lambda x: self._shard(x, samples), (args, kwargs))
            inputs = leaves_of(Tensor, (args, kwargs))
        return ShardedArguments(args, kwargs, inputs, plain_arguments, samples, batch, operations)

    def _operations_of(self, model: nn.Module, inputs: Sequence[Tensor], plain: tuple) -> RepeatedOperations:
        """Returns the operations of the last forward with such arguments; new ones if there was none."""
        shapes = [(x.shape, x.requires_grad) for x in inputs]
        key = (model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *shapes, *plain)
        found = self._operations.get(key)
        if found is None:
            if len(self._operations) >= _MOST_LAYOUTS:
                self._operations.clear()  # shapes that never repeat must not fill the memory
            found = self._operations[key] = RepeatedOperations(self.grid.tiles)
        return found

    def compare_whole(
        self,
        model: nn.Module,
        images: list[Tensor],
        labels: Tensor | None,
        modules: Modules,
        parameters: Parameters,
    ) -> None:
        """Raises a MismatchError on every rank if ranks that share images have different whole images or labels."""
        if self.grid.tiles.size > 1:

            def summaries() -> tuple:
                return tuple(tensor_summary(x) for x in (*images, *([] if labels is None else [labels])))

            compare_forwards(self.grid.tiles, model, modules, images, summaries, (), parameters)

    def _summary(self, x: Tensor) -> tuple[Any, ...]:
        """Returns what must be equal of an input on ranks that share images; of a whole one, the values."""
        if isinstance(x, ShardedTensor):
            return ("part", *x.spec.shape)
        if self.cuts_images and x.dim() > 2 and not self._is_whole(x):
            return ("tile", x.shape[0], x.dim(), x.dtype, x.requires_grad)
        return tensor_summary(x)

    def _is_whole(self, x: Tensor) -> bool:
        """Whether an image is whole. False if the first rank's tile is the whole image."""
        if tuple(x.shape[1:]) != self.input_shape:
            return False
        first = self._layout(tuple(x.shape), Samples(0, x.shape[0])).local_shape(tile=0)
        return first != tuple(x.shape)

    def _layout(self, shape: tuple[int, ...], samples: Samples) -> Sharding:
        """Returns the sharding of an input: the same object for the same values, with the plans cached in it."""
        known = self._layouts.get((shape, samples))
        if known is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()  # shapes that never repeat must not fill the memory
            known = self._layouts[shape, samples] = image_layout(self.grid, shape, samples, self.learned)
        return known

    def _samples(self, model: nn.Module, inputs: list[Tensor], operations: RepeatedOperations) -> tuple[Samples, int]:
        """Returns the samples of the global batch that this rank's replica has, and how many.

        In training, replicas exchange their batch sizes, and whether they know their operations.
        """
        batch = 0
        for x in inputs:
            if x.dim():
                batch = x.spec.shape[0] if isinstance(x, ShardedTensor) else x.shape[0]
                break
        replicas = self.grid.replicas
        if replicas.size == 1 or not model.training:
            operations.known &= replicas.size == 1
            return Samples(0, batch, known=replicas.size == 1), batch
        number = operations.outer_number if operations.known else 0
        facts = [part.tolist() for part in replicas.allgather(torch.tensor([batch, number]))]
        sizes, numbers = [size for size, _ in facts], {number for _, number in facts}
        operations.known = len(numbers) == 1 and 0 not in numbers
        return Samples(sum(sizes[: replicas.rank]), sum(sizes)), batch

    def _shard(self, x: Tensor, samples: Samples) -> Tensor:
        """Returns an image as a ShardedTensor, any other input as it is."""
        if not self.cuts_images or isinstance(x, ShardedTensor) or x.dim() < 3:
            return x
        shape = self._global_shape(x)
        layout = self._layout(shape, samples)
        if tuple(x.shape) == layout.local_shape():
            return wrap(x, layout)
        if tuple(x.shape) == shape:
            return shard_of(x, layout)
        raise ParallelizeError(
            f"rank {self.grid.comm.rank} of {self.grid.comm.size}: expected this rank's tile {layout.local_shape()} of "
            f"an input {shape}, or all of it, got {tuple(x.shape)}. torchmn.data.scatter_regions gives each rank its "
            "tile."
        )

    def _global_shape(self, x: Tensor) -> tuple[int, ...]:
        """Returns the shape of the global input, by `input_shape` or from the shapes of all ranks' tiles."""
        if self.input_shape is not None and len(self.input_shape) == x.dim() - 1:
            return (x.shape[0], *self.input_shape)
        tiles = self.grid.tiles
        shapes = [tuple(part.tolist()) for part in tiles.allgather(torch.tensor(x.shape))]
        shape = global_shape(self.grid, shapes)
        if tiles.size > 1 and shape not in self._checked:
            self._check_differs(x, shape)
            if len(self._checked) >= _MOST_SHAPES:
                self._checked.clear()
            self._checked.add(shape)
        return shape

    def _check_differs(self, x: Tensor, shape: tuple[int, ...]) -> None:
        """Raises an error if all ranks have the same values: then they are whole images, not tiles of `shape`."""
        values = x.detach().cpu().contiguous()
        digest = digest_of((values,))
        constant = x.numel() == 0 or bool((values == values.view(-1)[0]).all())
        if len(set(self.grid.tiles.allgather_obj(digest))) == 1 and not constant:
            raise ParallelizeError(
                f"rank {self.grid.comm.rank} of {self.grid.comm.size}: every rank passed the same {tuple(x.shape)}, as "
                f"if it were its tile of {shape}. If these are whole images, pass parallelize(..., "
                f"input_shape={tuple(x.shape[1:])}); if they are tiles, input_shape={shape[1:]}."
            )


def compare_forwards(
    comm: Communicator,
    model: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    inputs: Sequence[Tensor],
    summaries: Callable[[], tuple],
    plain_arguments: tuple,
    parameters: Sequence[tuple[str, nn.Parameter]],
    operations: int = 0,
) -> list[int]:
    """Compares the forward that each rank is about to compute.

    Args:
        comm: the ranks that must agree.
        model: the parallel model.
        modules: its modules, with their names.
        inputs: the tensors among its arguments.
        summaries: returns what must be equal on all ranks of each input.
        plain_arguments: arguments that are not tensors.
        parameters: of the model, with their names.
        operations: number of the operations that this rank expects.

    Returns:
        The `operations` of all ranks.

    Raises:
        MismatchError: on every rank, if ranks would not compute the same forward and backward.
    """
    training = model.training
    other_modes = [name for name, module in modules if module.training != training]
    gradients = "inference mode" if torch.is_inference_mode_enabled() else torch.is_grad_enabled()
    # If one rank has frozen a parameter, its backward skips communication for which the other ranks would wait.
    same = {
        "mode": "training" if training else "evaluation",
        "modules in the other mode": tuple(other_modes),
        "gradients": gradients,
        "autocast": _autocast(inputs),
        "whole inputs": summaries,
        "other arguments": plain_arguments,
        "frozen parameters": lambda: tuple([name for name, p in parameters if not p.requires_grad]),
    }
    return comm.agree("forward of a parallel model", differ=operations, optional=True, **same)


def _autocast(inputs: Sequence[Tensor]) -> torch.dtype | None:
    """Returns the dtype of autocast; None if it is off."""
    device = inputs[0].device.type if inputs else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def plain_values(leaves: Sequence[Any]) -> tuple:
    """Returns the arguments of simple types, which can be compared and on which the path of a forward may depend."""
    return tuple(x for x in leaves if x is None or isinstance(x, bool | int | float | str))


def are_only_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call has only tensors as positional arguments."""
    for x in args:
        if not isinstance(x, Tensor):
            return False
    return not kwargs


def as_meta(x: Tensor) -> Tensor:
    """Returns a meta tensor like `x`; a ShardedTensor on the meta device if `x` is one."""
    if isinstance(x, ShardedTensor):
        return wrap(torch.empty_like(local(x), device="meta").requires_grad_(x.requires_grad), x.spec)
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def tensor_summary(x: Tensor) -> tuple[Any, ...]:
    """Returns shape, dtype, requires_grad and a checksum of the values, to be compared between ranks."""
    values = wire.as_bytes(x.detach().cpu().contiguous())[:_COMPARED_BYTES]
    return (*x.shape, x.dtype, x.requires_grad, checksum_of(values))


def global_shape(grid: ProcessGrid, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the global shape of an input of which the ranks of `grid.tiles` have tiles of these shapes.

    Raises:
        ParallelizeError: if the shapes are not those of an evenly cut image.
    """
    first = shapes[0]
    axes = grid.axes_of(len(first) - 2)
    shape = list(first)
    layout = Sharding(grid, first, (None,) * len(first), Samples(0, first[0]))
    for dim, axis in enumerate(axes, start=2):
        extents = {layout.place(axis, tile): part[dim] for tile, part in enumerate(shapes) if len(part) == len(first)}
        shape[dim] = sum(extents.values())
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
            f"for an input {tuple(shape)}: evenly cut, larger tiles first. torchmn.data.scatter_regions does so."
        )
    return tuple(shape)
