"""Small cases of every kind, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from torchmn.errors import HaloError
from torchmn.geometry import DimPlan, Interval, Window, all_owned

MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """A window of a convolution, a pool or a transposed convolution."""
    stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    transposed = draw(st.booleans())
    output_padding = draw(st.integers(0, max(stride, dilation) - 1)) if transposed else 0
    ceil_mode = not transposed and draw(st.booleans())
    return Window(draw(st.integers(1, 6)), stride, padding, dilation, ceil_mode, transposed, output_padding)


@st.composite
def window_dims(draw: st.DrawFn, largest: int = 16, most_parts: int = 5) -> DimPlan:
    """The plan of a window along one dim, with parts of uneven sizes and empty ones too."""
    mode = draw(st.sampled_from(MODES))
    extent, parts = draw(st.integers(1, largest)), draw(st.integers(1, most_parts))
    window = draw(windows())
    try:
        return DimPlan.of_window(extent, parts, window, mode)
    except HaloError:
        return DimPlan.of_window(extent, parts, Window(1))


@st.composite
def any_dims(draw: st.DrawFn, largest: int = 9, most_parts: int = 4) -> DimPlan:
    """A dim whose parts need arbitrary intervals."""
    mode = draw(st.sampled_from(MODES))
    extent, parts = draw(st.integers(1, largest)), draw(st.integers(1, most_parts))
    reach = {"reflect": extent - 1, "circular": extent}.get(mode, 3)
    ends = [sorted(draw(st.tuples(*[st.integers(-reach, extent + reach)] * 2))) for _ in range(parts)]
    return DimPlan(extent, all_owned(extent, parts), tuple(Interval(*pair) for pair in ends), mode)
