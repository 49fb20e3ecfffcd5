"""Windows against torch itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.geometry.strategies import windows
from torchmn.errors import HaloError
from torchmn.geometry import Interval, Window, all_owned, owned


@given(st.integers(0, 50), st.integers(1, 12))
def test_parts_are_balanced_larger_first_and_cover_the_dim(extent, parts):
    intervals = all_owned(extent, parts)
    assert [i for interval in intervals for i in range(interval.start, interval.stop)] == list(range(extent))
    sizes = [len(interval) for interval in intervals]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    assert intervals == tuple(owned(extent, parts, place) for place in range(parts))


def test_intervals():
    assert Interval(2, 5).intersection(Interval(4, 9)) == Interval(4, 5)
    assert not Interval(2, 5).intersection(Interval(5, 9)) and len(Interval(5, 2)) == 0
    assert Interval(2, 5).shift(-3) == Interval(-1, 2) and 4 in Interval(2, 5) and 5 not in Interval(2, 5)
    assert str(Interval(2, 5)) == "2..4" and str(Interval(2, 2)) == "nothing"


def torch_output(window: Window, x: torch.Tensor) -> torch.Tensor | None:
    """The window as torch's own layer with a kernel of ones (a pool: its maximum); None if torch refuses it."""
    low, high = window.padding
    kernel = torch.ones(1, 1, window.kernel, dtype=x.dtype)
    try:
        if window.transposed:
            return F.conv_transpose1d(x, kernel, None, window.stride, low, window.output_padding, 1, window.dilation)
        if window.ceil_mode:
            return F.max_pool1d(x, window.kernel, window.stride, low, window.dilation, ceil_mode=True)
        return F.conv1d(F.pad(x, (low, high)), kernel, None, window.stride, 0, window.dilation)
    except RuntimeError:
        return None


def as_torch_has_it(window: Window) -> Window:
    """torch's pools and transposed convolutions pad both sides equally, a pool by at most half its kernel."""
    low, high = window.padding
    if window.ceil_mode:
        low = high = min(low, window.kernel // 2)
    if window.transposed:
        high = low
    return Window(
        window.kernel,
        window.stride,
        (low, high),
        window.dilation,
        window.ceil_mode,
        window.transposed,
        window.output_padding,
    )


@settings(max_examples=1500, deadline=None)
@given(windows().map(as_torch_has_it), st.integers(1, 14))
def test_the_number_of_outputs_is_torch_s(window, extent):
    theirs = torch_output(window, torch.zeros(1, 1, extent, dtype=torch.float64))
    if theirs is None or theirs.shape[-1] == 0:
        with pytest.raises(HaloError, match=f"conv2 .* image of {extent} "):
            window.output_extent(extent, name="conv2")
    else:
        assert window.output_extent(extent) == theirs.shape[-1]


@settings(max_examples=500, deadline=None)
@given(windows().map(as_torch_has_it), st.integers(1, 12), st.data())
def test_an_output_depends_on_needed_inputs_only(window, extent, data):
    x = torch.zeros(1, 1, extent, dtype=torch.float64)
    if torch_output(window, x) is None:
        return
    outputs = window.output_extent(extent)
    start = data.draw(st.integers(0, outputs - 1))
    chosen = Interval(start, data.draw(st.integers(start + 1, outputs)))
    needed = window.needed(chosen, extent)
    touched = set()
    for index in range(extent):
        probe = x.clone()
        probe[0, 0, index] = 1
        if torch_output(window, probe)[0, 0, chosen.as_slice()].any():
            touched.add(index)
    assert touched <= set(range(needed.start, needed.stop))
    if window.dilation == 1 and window.stride <= window.kernel:  # else there are holes between the taps
        inside = needed.intersection(Interval(0, extent))
        assert touched == set(range(inside.start, inside.stop))


def test_no_outputs_need_nothing():
    assert not Window(5, padding=(2, 2)).needed(Interval(3, 3), 8)


def test_an_image_smaller_than_the_window_is_an_error_that_names_the_module_and_the_numbers():
    with pytest.raises(HaloError, match=r"^conv2 \(kernel 7, stride 1, padding 0\) has no output for an image of 6 "):
        Window(7).output_extent(6, name="conv2")


def test_padding_may_be_one_number():
    assert Window(3, padding=1) == Window(3, padding=(1, 1))
    assert Window(3, padding=-1).needed(Interval(0, 2), 8) == Interval(1, 5)


@pytest.mark.parametrize(
    "settings",
    [(0,), (-1,), (3, 0), (3, -1), (3, 1, (0, 0), 0), (2.0,), (3, 1, (1,)), (3, 1, (1.5, 0)), (3, 1, None)],
    ids=str,
)
def test_numbers_that_are_no_window_are_refused(settings):
    with pytest.raises(HaloError, match="expected a window of whole numbers"):
        Window(*settings)
