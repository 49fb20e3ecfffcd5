"""halo_exchange: the buffer is the serial image's, backward is the exact adjoint."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._worlds import ranks
from tests.functions.images import cut, image, part_of, plan_here, serial_buffer
from tests.geometry.strategies import any_dims, window_dims
from torchmn import run_threads
from torchmn.errors import ArgumentError, MismatchError, PeerError, TorchMNError
from torchmn.functions import halo_exchange, halo_scatter_add, start_halo_exchange, start_halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window, all_owned

SAME3, SAME7, STRIDED, POOL = Window(3, padding=(1, 1)), Window(7, padding=(3, 3)), Window(5, 2), Window(2, 2)
MODES = ("zeros", "reflect", "replicate", "circular")


def assert_exchange_is_serial(comm, dims, leading=(2, 3), fill=0.0):
    """Values, adjoint and double backward of one exchange on this rank."""
    plan = plan_here(dims, comm)
    extents = tuple(dim.extent for dim in dims)
    whole = image((*leading, *extents)).requires_grad_()
    x = part_of(whole.detach(), plan).requires_grad_()
    buffer = halo_exchange(x, plan, comm, fill)
    expected = serial_buffer(whole, plan, fill)
    assert buffer.shape == expected.shape == (*leading, *plan.buffer_shape)
    assert torch.equal(buffer, expected)

    # <Fx, y> = <x, F*y> over all ranks, and F*y element by element.
    y = image(tuple(expected.shape), seed=1 + comm.rank)
    (of_whole,) = torch.autograd.grad(expected, whole, y)
    serial = comm.allreduce(of_whole)
    probe = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(buffer, x, probe, create_graph=True)
    torch.testing.assert_close(gradient, part_of(serial, plan), rtol=1e-12, atol=1e-12)

    # The gradient of the gradient is the exchange itself, with padding that counts for nothing.
    again = image(tuple(whole.shape), seed=99)
    (second,) = torch.autograd.grad(gradient, probe, part_of(again, plan))
    assert torch.equal(second, serial_buffer(again, plan))


def grid_dims(windows, extents, parts, mode="zeros"):
    return tuple(
        DimPlan.of_window(extent, n, window, mode) for window, extent, n in zip(windows, extents, parts, strict=True)
    )


CASES = {
    "1D same": ([SAME3], [11], "n"),
    "1D wider than the neighbour": ([SAME7], [7], "n"),
    "1D strided": ([STRIDED], [17], "n"),
    "1D no halo": ([POOL], [12], "n"),
    "2D rows": ([SAME3, SAME3], [10, 7], "n1"),
    "2D columns": ([SAME7, STRIDED], [9, 16], "1n"),
    "2D transposed": ([Window(3, 2, (1, 1), transposed=True, output_padding=1), SAME3], [6, 5], "n1"),
    "3D": ([SAME3, Window(3, 2), Window(2, 2)], [5, 8, 6], "1n1"),
}


@pytest.mark.parametrize("case", CASES)
@ranks(1, 2, 3, 4)
def test_buffer_and_adjoint_equal_the_serial_ones(comm, case):
    windows, extents, pattern = CASES[case]
    parts = [comm.size if letter == "n" else 1 for letter in pattern]
    assert_exchange_is_serial(comm, grid_dims(windows, extents, parts), fill=-2.0)


@pytest.mark.parametrize("mode", MODES)
@ranks(2, 3, 4)
def test_padding_modes_are_resolved_globally(comm, mode):
    assert_exchange_is_serial(comm, grid_dims([SAME7], [7], [comm.size], mode))
    assert_exchange_is_serial(comm, grid_dims([SAME3, Window(5, 2, (2, 2))], [6, 9], [1, comm.size], mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grid", [(1, 3), (2, 3), (3, 3), (4, 4)], ids=str)
def test_grids_with_corners_and_uneven_tiles(grid, mode):
    dims = grid_dims([SAME7, Window(4, 2, (2, 1))], [10, 13], grid, mode)
    run_threads(lambda comm: assert_exchange_is_serial(comm, dims), grid[0] * grid[1], timeout=30)


@ranks(4, on=("mpi", "gloo"))
def test_a_square_grid_of_processes(comm):
    for mode in MODES:
        assert_exchange_is_serial(comm, grid_dims([SAME3, SAME7], [9, 8], [2, 2], mode))


def test_three_dims_on_a_grid_of_two_by_one_by_three():
    dims = grid_dims([SAME3, SAME3, STRIDED], [5, 3, 14], [2, 1, 3], "reflect")
    run_threads(lambda comm: assert_exchange_is_serial(comm, dims, (2,)), 6, timeout=30)


@settings(max_examples=60, deadline=None)
@given(window_dims(12, 4), st.integers(0, 2))
def test_any_window_along_one_dim(dim, leading):
    run_threads(lambda comm: assert_exchange_is_serial(comm, (dim,), (2,) * leading), dim.parts, timeout=30)


@settings(max_examples=60, deadline=None)
@given(st.tuples(any_dims(6, 3), any_dims(6, 2)))
def test_arbitrary_needs_on_any_grid(dims):
    run_threads(lambda comm: assert_exchange_is_serial(comm, dims, (1, 2)), dims[0].parts * dims[1].parts, timeout=30)


@ranks(3)
def test_every_dtype(comm):
    plan = plan_here(grid_dims([SAME3], [8], [comm.size]), comm)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.int64, torch.bool):
        whole = image((3, 8), dtype=dtype)
        assert torch.equal(halo_exchange(part_of(whole, plan), plan, comm), serial_buffer(whole, plan))


@ranks(2, on="threads")
def test_layouts_are_kept_and_any_layout_is_read(comm):
    plan = plan_here(grid_dims([SAME3, SAME3], [8, 6], [2, 1]), comm)
    whole = image((2, 3, 8, 6))
    expected = serial_buffer(whole, plan)
    last = part_of(whole, plan).contiguous(memory_format=torch.channels_last).requires_grad_()
    buffer = halo_exchange(last, plan, comm)
    assert torch.equal(buffer, expected) and buffer.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(buffer, last, buffer.detach().clone())
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    strided = part_of(whole, plan).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(halo_exchange(strided, plan, comm), expected)


@ranks(3)
def test_an_empty_batch(comm):
    plan = plan_here(grid_dims([SAME3], [8], [comm.size]), comm)
    x = torch.empty(0, 2, plan.owned_shape[0], requires_grad=True)
    buffer = halo_exchange(x, plan, comm)
    assert buffer.shape == (0, 2, *plan.buffer_shape)
    buffer.sum().backward()
    assert x.grad.shape == x.shape


@ranks(2, 3)
def test_large_halos(comm):
    comm.max_message_bytes, limit = 1000, comm.max_message_bytes
    try:
        assert_exchange_is_serial(comm, grid_dims([SAME7, SAME3], [12, 20], [comm.size, 1]))
    finally:
        comm.max_message_bytes = limit


@ranks(2, on="threads")
def test_nothing_is_copied_where_nothing_is_needed(comm):
    whole = image((1, 8))
    plan = plan_here(grid_dims([POOL], [8], [2]), comm)
    x = part_of(whole, plan)
    assert halo_exchange(x, plan, comm) is x
    crop = plan_here(grid_dims([Window(1, 4)], [8], [2]), comm)
    assert halo_exchange(x, crop, comm).data_ptr() == x.data_ptr()


@ranks(4, on="threads")
def test_one_message_per_neighbour_and_none_to_others(comm):
    plan = plan_here(grid_dims([SAME3, SAME3], [8, 16], [1, 4]), comm)
    sent = []
    original = comm.transport.exchange
    comm.transport.exchange = lambda out, into: (sent.append((sorted(out), sorted(into))), original(out, into))[1]
    halo_exchange(image((2, 3, *plan.owned_shape)), plan, comm)
    neighbours = [peer for peer in (comm.rank - 1, comm.rank + 1) if 0 <= peer < 4]
    assert sent == [(neighbours, neighbours)]


@ranks(2, 3)
def test_work_between_start_and_finish_sees_no_halo_and_finish_gives_all(comm):
    dims = grid_dims([SAME3], [3 * comm.size], [comm.size])
    plan = plan_here(dims, comm)
    first, second = image((2, 3 * comm.size)), image((2, 3 * comm.size), seed=5)
    # Two at once, finished in the other order: messages are matched by the order in which they were started.
    one = start_halo_exchange(part_of(first, plan), plan, comm)
    two = start_halo_exchange(part_of(second, plan), plan, comm)
    assert float(comm.allreduce(torch.ones(()))) == comm.size
    assert torch.equal(two.finish(), serial_buffer(second, plan))
    assert torch.equal(one.finish(), serial_buffer(first, plan))
    gradients = image((2, *plan.buffer_shape), seed=comm.rank)
    back = start_halo_scatter_add(gradients, plan, comm)
    assert torch.equal(back.finish(), halo_scatter_add(gradients, plan, comm))


@ranks(2, on="threads")
def test_received_boxes_alone_are_enough_to_build_the_buffer(comm):
    plan = plan_here(grid_dims([SAME3, SAME3], [6, 4], [2, 1], "reflect"), comm)
    whole = image((1, 6, 4))
    expected = serial_buffer(whole, plan)
    boxes = start_halo_exchange(part_of(whole, plan), plan, comm).received()
    assert boxes
    for box, block in boxes:
        assert torch.equal(block, expected[box.target_slices])


@ranks(2, on="threads")
def test_a_part_of_another_shape_is_refused(comm):
    plan = plan_here(grid_dims([SAME3], [8], [2]), comm)
    with pytest.raises(ArgumentError, match=r"rank \d of 2: halo_exchange: .*last dims are \(4,\), got shape \(3, 5\)"):
        halo_exchange(torch.zeros(3, 5), plan, comm)
    other = HaloPlan(plan.dims, (1 - comm.rank,))
    with pytest.raises(ArgumentError, match=r"expected the plan of rank . of 2, got that of rank . of 2"):
        halo_exchange(torch.zeros(4), other, comm)


@pytest.mark.parametrize("difference", ["dtype", "plan", "gradient", "channels"])
@ranks(2)
def test_ranks_in_different_exchanges_get_an_error_and_not_each_other_s_numbers(comm, difference):
    odd = comm.rank == 1
    needed = (Interval(0, 5), Interval(3, 9 if odd and difference == "plan" else 8))  # halos of the same size
    plan = plan_here((DimPlan(8, all_owned(8, 2), needed),), comm)
    leading = (3, 2) if odd and difference == "channels" else (2, 3)
    x = torch.zeros(*leading, 4, dtype=torch.int32 if odd and difference == "dtype" else torch.float32)
    x.requires_grad_(odd and difference == "gradient")
    words = r"(is in another exchange: expected|ranks disagree in) halo_exchange(.|\n)*halo_exchange"
    with pytest.raises(MismatchError, match=words):
        halo_exchange(x, plan, comm)


@ranks(2)
def test_a_rank_with_a_larger_batch_is_an_error_that_says_so(comm):
    plan = plan_here((DimPlan(8, all_owned(8, 2), (Interval(0, 5), Interval(3, 8))),), comm)
    # The rank with the smaller buffer cannot receive; whether the other one can depends on the transport.
    words = "the expected size" if comm.rank == 0 else "the expected size|another exchange"
    words = f"({words})(.|\n)*with the same plan, batch, channels and dtype"
    if not comm.traits.checks_sizes:  # gloo: ranks compare first
        words = r"batch and channels \(2,\)(.|\n)*batch and channels \(102,\)"
    with pytest.raises(MismatchError, match=words):
        halo_exchange(torch.zeros(2 + 100 * comm.rank, 4), plan, comm)


def test_the_watchdog_names_a_rank_that_does_not_take_part():
    def main(comm):
        plan = plan_here(grid_dims([SAME3], [8], [2]), comm)
        if comm.rank == 0:
            halo_exchange(torch.zeros(4), plan, comm)

    with pytest.raises(PeerError, match=r"rank 1 ended while rank 0 waits for it\n(.*\n)*.*halo_exchange +rank 1"):
        run_threads(main, 2, timeout=30)


@ranks(1, 2, on="threads")
def test_a_communicator_that_was_finalized_is_refused(comm):
    plan = plan_here(grid_dims([SAME3], [8], [comm.size]), comm)
    comm.finalize()
    if comm.size > 1:  # alone there is nothing to exchange
        with pytest.raises(TorchMNError, match="halo_exchange on a communicator that was finalized"):
            halo_exchange(torch.zeros(4), plan, comm)
    else:
        assert halo_exchange(torch.zeros(8), plan, comm).shape == (10,)


def test_the_pieces_of_an_image_are_the_image():
    whole = image((2, 7))
    assert torch.equal(torch.cat([cut(whole, [mine]) for mine in all_owned(7, 3)], -1), whole)


@ranks(2, on="mpi")
def test_a_rank_does_not_wait_for_slower_ones_to_take_its_rows(comm):
    """Rank 1 starts its exchange only after rank 0 has finished."""
    plan = plan_here(grid_dims([Window(2, padding=(1, 0))], [8], [2]), comm)
    whole = image((1 << 17, 8))
    if comm.rank == 1:
        comm.recv(0)
    buffer = halo_exchange(part_of(whole, plan), plan, comm)
    if comm.rank == 0:
        comm.send(torch.ones(1), 1)
    assert torch.equal(buffer, serial_buffer(whole, plan))
