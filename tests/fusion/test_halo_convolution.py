"""halo_convolution: outputs and all gradients equal those of the convolution on one rank."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests._worlds import ranks
from tests.functions.images import image, part_of, plan_here
from torchmn import run_threads
from torchmn.errors import HaloError
from torchmn.functions import halo_exchange
from torchmn.geometry import DimPlan, Window, all_owned
from torchmn.sharded.fusion.halo_convolution import halo_convolution
from torchmn.sharded.fusion.halo_reach import borders_of


def assert_convolution_is_serial(comm, extents, parts, windows, groups=1, mode="zeros", twice=False):
    """Outputs, gradients and, if asked for, second derivatives of one convolution on this rank."""
    dims = tuple(DimPlan.of_window(e, n, w, mode) for e, n, w in zip(extents, parts, windows, strict=True))
    plan = plan_here(dims, comm)
    stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
    whole = image((2, 2 * groups, *extents)).requires_grad_()
    weight = image((3 * groups, 2, *(w.kernel for w in windows)), seed=1).requires_grad_()
    bias = image((3 * groups,), seed=2).requires_grad_()
    pad = [end for w in reversed(windows) for end in w.padding]
    padded = F.pad(whole, pad) if mode == "zeros" else F.pad(whole, pad, mode)
    function = (F.conv1d, F.conv2d, F.conv3d)[len(extents) - 1]
    serial = function(padded, weight, bias, stride, 0, dilation, groups)
    upstream = image(tuple(serial.shape), seed=3)
    expected = torch.autograd.grad(serial, (whole, weight, bias), upstream, create_graph=twice)

    mine = [
        all_owned(w.output_extent(e), n)[at] for w, e, n, at in zip(windows, extents, parts, plan.place, strict=True)
    ]
    outputs = (..., *(interval.as_slice() for interval in mine))
    x = part_of(whole.detach(), plan).requires_grad_()
    y = halo_convolution(x, weight, bias, plan, comm, stride, dilation, groups)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(y, serial[outputs], **close)
    found = torch.autograd.grad(y, (x, weight, bias), upstream[outputs].contiguous(), create_graph=twice)
    torch.testing.assert_close(found[0], part_of(expected[0], plan), **close)
    for share, total in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(comm.allreduce(share), total.detach(), **close)
    if twice:
        # Every rank's part of the sum of squares of the input's gradient, as one loss.
        (second,) = torch.autograd.grad(found[0].square().sum(), weight)
        (expected_second,) = torch.autograd.grad(expected[0].square().sum(), weight)
        torch.testing.assert_close(comm.allreduce(second), expected_second, **close)


SAME3, SAME5 = Window(3, padding=(1, 1)), Window(5, padding=(2, 2))
CASES = {
    "same": ([9], [SAME3]),
    "wide": ([8], [Window(7, padding=(3, 3))]),
    "strided": ([11], [Window(3, 2, (1, 1))]),
    "valid": ([12], [Window(4)]),
    "dilated": ([13], [Window(3, padding=(2, 2), dilation=2)]),
    "stem": ([16, 6], [Window(7, 2, (3, 3)), Window(3, padding=(0, 1))]),
    "one row each": ([4, 5], [SAME5, SAME3]),
    "3D": ([6, 3, 4], [SAME3, SAME3, Window(2)]),
}


@pytest.mark.parametrize("case", CASES)
@ranks(1, 2, 3, 4)
def test_outputs_and_gradients_equal_the_serial_ones(comm, case):
    extents, windows = CASES[case]
    assert_convolution_is_serial(comm, extents, (comm.size, *[1] * (len(extents) - 1)), windows, groups=2, twice=True)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (2, 3), (3, 3)], ids=str)
def test_grids_with_corners(grid):
    def main(comm):
        assert_convolution_is_serial(comm, (10, 11), grid, (SAME5, SAME3), twice=True)
        assert_convolution_is_serial(comm, (7, 9), grid, (Window(3, 2, (1, 1)), SAME5))
        assert_convolution_is_serial(comm, (3, 3), grid, (SAME5, SAME5))

    run_threads(main, grid[0] * grid[1], timeout=60)


@ranks(4, on="threads")
def test_three_dims_on_a_grid(comm):
    assert_convolution_is_serial(comm, (5, 4, 6), (2, 1, 2), (SAME3, SAME3, SAME5))


@ranks(2, on="threads")
def test_other_padding_modes(comm):
    for mode in ("reflect", "replicate", "circular"):
        assert_convolution_is_serial(comm, (9, 6), (2, 1), (SAME5, SAME3), mode=mode)


@ranks(4, on="threads")
def test_ranks_without_outputs_take_part(comm):
    assert_convolution_is_serial(comm, (6,), (4,), (Window(5),), twice=True)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_convolution(data):
    def window():
        padding = data.draw(st.integers(0, 3))
        kernel, stride, dilation = (data.draw(st.integers(1, most)) for most in (4, 3, 2))
        return Window(kernel, stride, (padding, padding), dilation)

    windows = (window(), window())
    extents = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    parts = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]))
    try:
        [w.output_extent(e) for w, e in zip(windows, extents, strict=True)]
    except HaloError:
        return
    run_threads(
        lambda comm: assert_convolution_is_serial(comm, extents, parts, windows), parts[0] * parts[1], timeout=60
    )


@ranks(2, on="threads")
def test_the_tile_is_not_copied_if_torchs_padding_suits_it(comm):
    same = plan_here((DimPlan.of_window(12, 2, SAME3), DimPlan.of_window(8, 1, SAME3)), comm)
    borders = borders_of(same, (3, 3), (1, 1), (1, 1))
    (reach,) = borders.reaches  # the one row from the neighbour, in a column of zeros at both ends
    assert borders.padding == (1, 1) and reach.strip_shape == (1, 10) and reach.tap_shape == (1, 3)
    valid = plan_here((DimPlan.of_window(12, 2, Window(3)), DimPlan.of_window(8, 1, SAME3)), comm)
    assert borders_of(valid, (3, 3), (1, 1), (1, 1)) is None


@ranks(2, on="threads")
def test_an_image_without_gradient_sends_no_gradient(comm):
    plan = plan_here((DimPlan.of_window(8, 2, SAME3),), comm)
    x, weight = part_of(image((1, 2, 8)), plan), image((2, 2, 3), seed=1).requires_grad_()
    started = []
    original = comm.transport.exchange
    comm.transport.exchange = lambda out, into: (started.append(1), original(out, into))[1]
    halo_convolution(x, weight, None, plan, comm, (1,), (1,)).sum().backward()
    assert weight.grad is not None and len(started) == 1


@ranks(2, on="threads")
def test_autocast_is_the_serial_autocast(comm):
    plan = plan_here((DimPlan.of_window(8, 2, SAME3),), comm)
    whole, weight = image((1, 2, 8), dtype=torch.float32), image((2, 2, 3), seed=1, dtype=torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = halo_convolution(part_of(whole, plan), weight, None, plan, comm, (1,), (1,))
        serial = F.conv1d(whole, weight, padding=1)
    assert y.dtype == serial.dtype == torch.bfloat16
    assert torch.equal(y, serial[..., all_owned(8, 2)[comm.rank].as_slice()])
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_the_tile_is_computed_during_the_halo_exchange():
    """Rank 1 sends its halo only after rank 0 has convolved its tile: to wait for the halo first would never end."""
    convolved = threading.Event()

    def main(comm):
        plan = plan_here((DimPlan.of_window(8, 2, SAME3),), comm)
        whole, weight = image((1, 2, 8)), image((2, 2, 3), seed=1)
        original = comm.transport.exchange
        if comm.rank == 1:
            comm.transport.exchange = lambda out, into: (convolved.wait(20), original(out, into))[1]

        class Watched(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if comm.rank == 0 and "convolution" in str(func):
                    convolved.set()
                return result

        with Watched():
            y = halo_convolution(part_of(whole, plan), weight, None, plan, comm, (1,), (1,))
        assert convolved.is_set()
        return y

    parts = run_threads(main, 2, timeout=15)
    torch.testing.assert_close(torch.cat(parts, -1), F.conv1d(image((1, 2, 8)), image((2, 2, 3), seed=1), padding=1))


@ranks(2, on="threads")
def test_it_is_the_convolution_of_the_exchanged_buffer(comm):
    plan = plan_here((DimPlan.of_window(9, 2, SAME3),), comm)
    x, weight = part_of(image((1, 2, 9)), plan), image((2, 2, 3), seed=1)
    expected = F.conv1d(halo_exchange(x, plan, comm), weight)
    torch.testing.assert_close(halo_convolution(x, weight, None, plan, comm, (1,), (1,)), expected)
