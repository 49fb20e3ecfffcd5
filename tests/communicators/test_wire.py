"""Headers are decoded as they were encoded, and buffers are split at the limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmn.communicators.messages import wire
from torchmn.communicators.messages.wire import Header, Kind, Layout, TensorSpec

SPECS = st.builds(
    TensorSpec,
    st.sampled_from(list(wire.DTYPE_CODES)),
    st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
    st.booleans(),
    st.booleans(),
)
HEADERS = st.builds(
    Header,
    st.sampled_from(Kind),
    st.integers(0, 2**62),
    st.integers(-(2**62), 2**62),
    st.lists(SPECS, max_size=20).map(lambda specs: Layout.of(tuple(specs))),
)


@given(HEADERS, st.binary(max_size=16))
def test_a_header_is_read_as_it_was_written_whatever_follows_it(header: Header, payload: bytes) -> None:
    encoded = header.encode()
    assert Header.decode(encoded + payload) == (header, len(encoded))


def test_the_number_of_a_dtype_on_the_wire_never_changes() -> None:
    # Ranks may run different versions of torch; a new dtype is appended, never inserted.
    assert [wire.DTYPE_CODES[dtype] for dtype in (torch.float32, torch.bool, torch.complex128, torch.uint64)] == [
        0,
        9,
        11,
        15,
    ]


@given(st.integers(0, 100), st.integers(1, 64))
def test_pieces_put_together_are_the_buffer_and_none_is_too_large(length: int, limit: int) -> None:
    flat = torch.arange(length, dtype=torch.int16)
    parts = list(wire.pieces(flat, limit))
    assert all(0 < part.nbytes <= max(limit, 2) for part in parts)
    assert torch.equal(torch.cat([flat[:0], *parts]), flat)


@pytest.mark.parametrize("dtype", list(wire.DTYPE_CODES))
def test_a_tensor_and_its_bytes_are_the_same_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(6, dtype=torch.uint8 if dtype == torch.bool else dtype).view(dtype)
    wire.as_bytes(x)[0] = 1
    assert wire.as_bytes(x).data_ptr() == x.data_ptr()
    assert wire.as_bytes(x).numel() == x.nbytes


def test_layouts_of_messages_of_many_tensors_are_not_cached() -> None:
    for length in range(3):
        specs = tuple(TensorSpec(torch.float32, (length, n)) for n in range(100))
        before = wire._layout_of_few.cache_info().currsize, wire._read_few.cache_info().currsize
        layout = Layout.of(specs)
        assert Layout.read(layout.encoded).specs == specs
        assert (wire._layout_of_few.cache_info().currsize, wire._read_few.cache_info().currsize) == before
