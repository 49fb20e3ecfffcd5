"""Data for tests: made from seeds, so that every rank can work out what every other rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchmn

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_FLOATS = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
EVERY_DTYPE = (*FLOATS, *SMALL_FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.complex32, torch.bool)

# A scalar, nothing, a vector, nothing with an extent, a matrix.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (2, 0, 3), (3, 4))


def roots(comm) -> list[int]:
    """The first rank, the second and the last: enough to find a root that is ignored or mixed up."""
    return sorted({0, 1 % comm.size, comm.size - 1})


def bits(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> Tensor:
    """A tensor of random bytes (NaNs and all): what arrives must equal it bit by bit."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.integers(0, 2, shape), dtype=np.bool_))
    result = torch.empty(tuple(shape), dtype=dtype)
    raw = rng.integers(0, 256, result.numel() * dtype.itemsize, dtype=np.uint8)
    if raw.size:
        result.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    return result


def numbers(shape: Sequence[int], *seed: int) -> np.ndarray:
    """Normally distributed float64 values."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def whole_numbers(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> np.ndarray:
    """Small whole numbers that `dtype` holds exactly, and so do sums over the ranks of a test."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return np.asarray(rng.integers(0, 2, shape), dtype=np.bool_)
    low = 0 if dtype in UNSIGNED else -3
    values = np.asarray(rng.integers(low, 4, shape))
    if dtype.is_complex:
        return values + 1j * rng.integers(low, 4, shape)
    return values if dtype in (*SIGNED, *UNSIGNED) else values.astype(np.float64)


def factors(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> np.ndarray:
    """Ones, minus ones where the dtype has them, and a few twos: products over ranks stay exact."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return np.asarray(rng.random(shape) < 0.8)
    values = np.where(rng.random(shape) < 0.15, 2, 1)
    if dtype not in UNSIGNED:
        values = values * np.where(rng.random(shape) < 0.5, 1, -1)
    return values if dtype in (*SIGNED, *UNSIGNED) else values.astype(np.float64)


def tensor(values: np.ndarray | Sequence | float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The values as a tensor of `dtype`."""
    return torch.from_numpy(np.array(values)).to(dtype)


def filled(model: nn.Module, *seed: int) -> nn.Module:
    """The model, its parameters replaced by numbers of a seed (torch's own seed is shared by all threads)."""
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(tensor(numbers(tuple(parameter.shape), *seed, place)))
    return model


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter that must have one."""
    assert parameter.grad is not None, "expected a gradient, got None"
    return parameter.grad


def odd_layouts(*seed: int) -> dict[str, Tensor]:
    """Tensors of ordinary values in memory that is not one plain block, or that autograd watches."""
    image = tensor(numbers((2, 3, 4, 5), *seed), torch.float32)
    matrix = tensor(numbers((6, 8), *seed))
    return {
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::3],
        "expanded": matrix[:, :1].expand(6, 3),
        "flipped offset": matrix[3:, 2:],
        "empty, as NumPy makes it": torch.from_numpy(np.empty(0)),
        "channels last": image.to(memory_format=torch.channels_last),
        "conjugate view": torch.complex(matrix, matrix + 1).conj(),
        "negative view": torch.complex(matrix, matrix + 1).conj().imag,
        "leaf that wants a gradient": matrix.clone().requires_grad_(),
        "result in a graph": matrix.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(matrix.clone()),
    }


def assert_same(got: object, expected: Tensor, what: object = "") -> None:
    """Fails unless `got` is a tensor outside any graph with the dtype, shape and bits of `expected`."""
    assert isinstance(got, Tensor), f"{what}: expected a tensor, got {got!r}"
    assert got.dtype == expected.dtype, f"{what}: expected {expected.dtype}, got {got.dtype}"
    assert got.shape == expected.shape, f"{what}: expected {tuple(expected.shape)}, got {tuple(got.shape)}"
    assert not got.requires_grad, f"{what}: the result is still part of a graph"
    assert plain_bytes(got) == plain_bytes(expected), f"{what}: expected {expected}, got {got}"


def assert_equal(got: Tensor, expected: Tensor, what: object = "") -> None:
    """As `assert_same`, but -0 equals 0."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), f"{what}: got {got.dtype} {got.shape}"
    assert not got.requires_grad, f"{what}: the result is still part of a graph"
    assert got.tolist() == expected.tolist(), f"{what}: expected {expected}, got {got}"


def assert_same_tuple(got: object, expected: Sequence[Tensor], what: object = "") -> None:
    """Fails unless `got` is a tuple of tensors that are `assert_same` as those of `expected`."""
    assert isinstance(got, tuple), f"{what}: expected a tuple, got {type(got).__name__}"
    assert len(got) == len(expected), f"{what}: expected {len(expected)} tensors, got {len(got)}"
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_same(one, other, f"{what}[{place}]")


def plain_bytes(x: Tensor) -> bytes:
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_close(got: object, expected: np.ndarray, relative: float = 1e-12) -> None:
    """Fails unless `got` is a tensor that holds the values of `expected`, computed by NumPy."""
    assert isinstance(got, Tensor), f"expected a tensor, got {got!r}"
    assert tuple(got.shape) == np.shape(expected), f"expected {np.shape(expected)}, got {tuple(got.shape)}"
    values = got.detach().to(torch.complex128 if got.is_complex() else torch.float64).numpy()
    np.testing.assert_allclose(values, expected, rtol=relative, atol=relative)


def assert_still_works(comm) -> None:
    """Fails unless the communicator computes correct results, for example after an error."""
    total = comm.allreduce(torch.tensor([float(comm.rank + 1), 1.0]))
    assert total.tolist() == [comm.size * (comm.size + 1) / 2, comm.size]
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))


def assert_refused(comm, call: Callable[[], object], *words: str, kind: type[Exception] = torchmn.TorchMNError) -> None:
    """Fails unless `call` raises `kind` on every rank, with all `words` in the message, and harms nothing."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, torchmn.TorchMNError), f"{caught.value!r} is not a TorchMNError"
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"rank {comm.rank}: {missing} not in: {type(caught.value).__name__}: {caught.value}"
    assert_still_works(comm)
