"""`load_weights`: loads plain weights from a file; each rank reads the shards that it holds."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchmn._torch_compat import metadata_of, set_metadata
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import checksum_of
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import ArgumentError, MismatchError
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.parallel.module import parallelism_of

_OPERATION = "load_weights"
_SHOWN = 8  # problems in a message
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DistributedDataParallel and torch.compile add to names


class LoadedWeights(NamedTuple):
    """What `load_weights` left out, with strict=False, as torch's `load_state_dict` returns it.

    `missing_keys` are names of the model that are not in the file, `unexpected_keys` names in the file that the model
    does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    comm: Communicator | None = None,
    *,
    prefix: str = "",
    strict: bool = True,
) -> LoadedWeights:
    """Loads the weights in a file into a model, parallel or not; all ranks must call.

        model = torchmn.parallelize(resnet18(), grid, mode="halopar")
        torchmn.load_weights(model, "resnet18.safetensors")

    The file is one of a plain model, with whole tensors. A rank reads the slices that it holds. Ranks compare what
    they have read; if anything does not fit, no rank changes its model.

    Args:
        model: a model that `torchmn.parallelize` returned, or any other module.
        path: a safetensors file, or a file written by `torch.save(model.state_dict(), path)`, which is read with
            weights_only=True, so that no code in it runs.
        comm: the ranks that load the same file; by default those of the grid of a parallel model, and for any other
            model this rank alone.
        prefix: load the names that begin with it, without it: "module." for a file of DistributedDataParallel.
        strict: raise if the file lacks a name of the model, or has others. With False these are left out; shapes must
            fit nevertheless.

    Returns:
        The names that were left out.

    Raises:
        ArgumentError: on every rank, if the file cannot be read, or its names or shapes do not fit the model.
        MismatchError: on every rank, if ranks have read different values.
    """
    problem = None if isinstance(model, nn.Module) else f"expected a module, got {describe(model)}"
    if comm is None and problem is None:
        found = (parallelism_of(module) for module in model.modules())
        comm = next((parallelism.grid.comm for parallelism in found if parallelism is not None), None)
    if comm is not None:
        comm.agree(_OPERATION, problem, prefix=prefix, strict=bool(strict))
    elif problem:
        raise ArgumentError(f"{_OPERATION}: {problem}")
    return _load_shards(model, Path(path), comm, prefix, strict)


def _load_shards(model: nn.Module, path: Path, comm: Communicator | None, prefix: str, strict: bool) -> LoadedWeights:
    """Reads the shards on all ranks, and loads them if all could read theirs."""
    with ExitStack() as files:

        def read() -> tuple[dict[str, int], LoadedWeights]:
            file = _Prefixed(files.enter_context(_opened(path)), prefix)
            left_out = _check(model, file, strict, str(path))
            shards.update(_read_shards(model, file))
            metadata.update(file.metadata())
            return ({} if comm is None else _checksums(model, shards)), left_out

        def load() -> None:
            if metadata:
                set_metadata(shards, metadata)  # versions of modules, for their `_load_from_state_dict`
            model.load_state_dict(shards, strict=False)

        shards, metadata = OrderedDict[str, Any](), dict[str, Any]()
        if comm is None:
            left_out = read()[1]
            load()
            return left_out
        ranks = comm.attempt("reading weights", read)
        _compare([checksums for checksums, _ in ranks], comm)
        comm.attempt(_OPERATION, load)
        return ranks[comm.rank][1]


# -- files -----------------------------------------------------------------------------------------------------------


class _File(Protocol):
    """An open file of tensors by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...] | None]:
        """Returns the shape of each entry; None of one that is not a tensor."""
        ...

    def read(self, name: str) -> Any: ...

    def read_rows(self, name: str, dim: int, indices: Tensor) -> Tensor:
        """Returns the entries at `indices` along `dim`, in their order."""
        ...

    def metadata(self) -> Mapping[str, Any]:
        """Returns torch's metadata of a state dict, by the name of the module."""
        ...


@dataclass(frozen=True)
class _StateDict:
    """A state dict whose tensors are mapped from a file: the system reads what is used of them."""

    state: Mapping[str, Any]

    def shapes(self) -> Mapping[str, tuple[int, ...] | None]:
        return {name: tuple(x.shape) if isinstance(x, Tensor) else None for name, x in self.state.items()}

    def read(self, name: str) -> Any:
        return self.state[name]

    def read_rows(self, name: str, dim: int, indices: Tensor) -> Tensor:
        return self.state[name].index_select(dim, indices)

    def metadata(self) -> Mapping[str, Any]:
        return metadata_of(self.state) or {}


@dataclass(frozen=True)
class _Safetensors:
    """A safetensors file, of which only what is asked for is read."""

    file: Any

    def shapes(self) -> Mapping[str, tuple[int, ...] | None]:
        return {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def read(self, name: str) -> Tensor:
        return self.file.get_tensor(name)

    def read_rows(self, name: str, dim: int, indices: Tensor) -> Tensor:
        whole, before = self.file.get_slice(name), (slice(None),) * dim
        runs = [whole[(*before, slice(begin, end))] for begin, end in _runs(indices)]
        if runs:
            return torch.cat(runs, dim)
        return whole[(*before, slice(0, 1))].narrow(dim, 0, 0)

    def metadata(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class _Prefixed:
    """The entries of a file whose names begin with `prefix`, without it."""

    file: _File
    prefix: str

    def shapes(self) -> Mapping[str, tuple[int, ...] | None]:
        shapes, start = self.file.shapes(), self.prefix
        return {name.removeprefix(start): shape for name, shape in shapes.items() if name.startswith(start)}

    def read(self, name: str) -> Any:
        return self.file.read(self.prefix + name)

    def read_rows(self, name: str, dim: int, indices: Tensor) -> Tensor:
        return self.file.read_rows(self.prefix + name, dim, indices)

    def metadata(self) -> Mapping[str, Any]:
        entries = ((f"{name}.", entry) for name, entry in self.file.metadata().items())
        return {
            name.removeprefix(self.prefix).rstrip("."): entry for name, entry in entries if name.startswith(self.prefix)
        }


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    """Context with an open file of weights; raises an ArgumentError if it is none."""
    if os.path.exists(path) and not os.path.isfile(path):  # would be waited for
        raise ArgumentError(f"{_OPERATION}: {path}: expected a regular file, not a directory, a pipe or a device")
    if path.suffix == ".safetensors":
        try:
            with _named_in_utf8(path) as name:
                file = safe_open(name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ArgumentError(f"{_OPERATION}: {path} cannot be read as safetensors: {error}") from error
        with file as opened:
            yield _Safetensors(opened)
    else:
        yield _StateDict(_state_dict_in(path))


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[Path]:
    """Context with a path of the same file in UTF-8, the only names that torch and safetensors open."""
    if os.fsencode(path).decode(errors="replace") == str(path):
        yield path
        return
    with TemporaryDirectory(prefix="torchmn-") as folder:
        link = Path(folder) / "weights"
        link.symlink_to(os.path.abspath(path))
        yield link


def _state_dict_in(path: Path) -> Mapping[str, Any]:
    try:
        with _named_in_utf8(path) as name:
            loaded = _load(name)
    except OSError as error:
        raise ArgumentError(f"{_OPERATION}: {path}: {error.strerror or error}") from error
    except Exception as error:  # torch.load raises errors of many types for files of other formats
        text = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            f"{_OPERATION}: {path}: expected a state dict of tensors, written by torch.save(model.state_dict(), path), "
            "or a file with the suffix .safetensors; torch.load with weights_only=True raised "
            f"{type(error).__name__}: {text}"
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise ArgumentError(
            f"{_OPERATION}: {path}: expected a state dict, from names to tensors, got {describe(loaded)}"
        )
    nested = [name for name, value in loaded.items() if isinstance(value, Mapping)]
    if nested and not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ArgumentError(
            f"{_OPERATION}: {path}: expected a state dict, from names to tensors, got several, named "
            f"{', '.join(nested)}. Save the one of the model alone: "
            f"torch.save(torch.load({path.name!r})[{nested[0]!r}], ...)"
        )
    return loaded


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file in the format before torch 1.6, which cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    """Returns the begin and end of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in indices.tolist():
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


# -- what a model needs ----------------------------------------------------------------------------------------------


def _slices(model: nn.Module) -> dict[str, tuple[SlicedModule, str]]:
    """Returns the parameters of which this rank holds a slice: the module and the parameter's name in it."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SlicedModule)
        for name in module.sliced_parameters
    }


def _check(model: nn.Module, file: _File, strict: bool, path: str) -> LoadedWeights:
    """Returns the names to leave out; raises an ArgumentError if names or shapes do not fit."""
    here, slices, saved = model.state_dict(), _slices(model), file.shapes()
    problems = []
    for name, x in here.items():
        shape = saved.get(name)
        if shape is None or not isinstance(x, Tensor) or is_lazy(x):
            continue
        module, key = slices.get(name, (None, ""))
        expected = tuple(x.shape) if module is None else module.global_shape(key)
        if shape != expected:
            problems.append(f"{name}: {shape} in the file, expected {expected}")
    missing = [name for name in here.keys() - saved.keys() if not _may_be_missing(name, here, saved)]
    left_out = LoadedWeights(sorted(missing), sorted(saved.keys() - here.keys()))
    if strict:
        problems += [f"{name}: not in the file" for name in left_out.missing_keys]
        problems += [f"{name}: not in the model" for name in left_out.unexpected_keys]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        lines = "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
        advice = _advice(left_out, saved)
        raise ArgumentError(f"{_OPERATION}: {path} does not fit the model; nothing was loaded:\n{lines}{advice}")
    return left_out


def _may_be_missing(name: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a name of the model need not be in the file.

    Files older than torch 0.4.1 have no counters of batch norms; safetensors files have only one of tied parameters.
    """
    if name.endswith("num_batches_tracked"):
        return True
    x = here[name]
    if not isinstance(x, Tensor) or is_lazy(x) or not x.numel():
        return False
    same = (other for key, other in here.items() if key in saved and isinstance(other, Tensor) and not is_lazy(other))
    return any(other.data_ptr() == x.data_ptr() and other.shape == x.shape for other in same)


def _advice(left_out: LoadedWeights, saved: Mapping[str, Any]) -> str:
    for prefix in _WRAPPERS:
        if saved and all(name.startswith(prefix) for name in saved):
            return f"\nAll names in the file begin with {prefix!r}: pass prefix={prefix!r}."
    if left_out.missing_keys or left_out.unexpected_keys:
        return "\nTo load the names that both have, pass strict=False."
    return ""


def _read_shards(model: nn.Module, file: _File) -> dict[str, Any]:
    """Returns this rank's part of all entries that model and file have."""
    slices, saved = _slices(model), file.shapes()
    shards = {}
    for name in model.state_dict().keys() & saved.keys():
        module, key = slices.get(name, (None, ""))
        if module is None:
            shards[name] = file.read(name)
        else:
            dim, indices_of = module.sliced_parameters[key]
            shards[name] = file.read_rows(name, dim, indices_of(None).cpu())
    return shards


def _checksums(model: nn.Module, shards: Mapping[str, Any]) -> dict[str, int]:
    """Returns checksums of what this rank has read, by a name that is the same on ranks that hold the same."""
    slices = _slices(model)
    found = {}
    for name in sorted(shards):
        if isinstance(shards[name], Tensor):
            tile = f" of tile rank {slices[name][0].grid.tiles.rank}" if name in slices else ""
            found[f"{name}{tile}"] = checksum_of(shards[name])
    return found


def _compare(ranks: list[dict[str, int]], comm: Communicator) -> None:
    """Raises a MismatchError on every rank if ranks have read different values of a tensor."""
    for name in dict.fromkeys(name for checksums in ranks for name in checksums):
        holders: dict[int, list[int]] = {}
        for rank, checksums in enumerate(ranks):
            if name in checksums:
                holders.setdefault(checksums[name], []).append(rank)
        if len(holders) > 1:
            groups = "; ".join(f"rank {ranks_text(group)}" for group in holders.values())
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: {_OPERATION}: ranks have read different values of {name}: {groups}; "
                "nothing was loaded. The file must be the same on all hosts"
            )
