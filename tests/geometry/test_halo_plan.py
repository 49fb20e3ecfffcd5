"""Halo plans against an oracle that goes index by index."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.oracle import executed_buffer, expected_buffer
from tests.geometry.strategies import any_dims, window_dims
from torchmn.errors import HaloError
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window, all_owned


def plans_of(dims):
    places = product(*(range(dim.parts) for dim in dims))
    return [HaloPlan(tuple(dims), place) for place in places]


def assert_right(dims):
    plans = plans_of(dims)
    for rank, plan in enumerate(plans):
        assert plan.rank == rank
        assert executed_buffer(plan) == expected_buffer(plan)
        for peer, boxes in plan.sends.items():
            assert boxes and plans[peer].receives[rank] == boxes
        for peer, boxes in plan.receives.items():
            assert boxes and plans[peer].sends[rank] == boxes
    assert {plan.anyone_exchanges for plan in plans} == {any(plan.receives for plan in plans)}


@settings(max_examples=2000, deadline=None)
@given(window_dims())
def test_every_window_gets_exactly_the_indices_it_needs(dim):
    assert_right([dim])


@settings(max_examples=1500, deadline=None)
@given(any_dims())
def test_arbitrary_needs_are_met(dim):
    assert_right([dim])


@settings(max_examples=400, deadline=None)
@given(st.tuples(any_dims(6, 3), any_dims(6, 3)))
def test_two_dims_exchange_their_corners(dims):
    assert_right(dims)


@settings(max_examples=60, deadline=None)
@given(st.tuples(any_dims(4, 2), any_dims(4, 2), any_dims(4, 2)))
def test_three_dims(dims):
    assert_right(dims)


def test_nothing_is_sent_where_no_halo_is_needed():
    pool = DimPlan.of_window(8, 2, Window(2, 2))
    assert all(not plan.sends and not plan.receives for plan in plans_of([pool, pool]))
    assert not plans_of([pool])[0].anyone_exchanges and plans_of([pool])[0].is_identity


def test_a_halo_wider_than_the_neighbour_comes_from_several_ranks():
    plan = plans_of([DimPlan.of_window(8, 4, Window(7, padding=(3, 3)))])[1]
    assert plan.dims[0].needed[1] == Interval(-1, 7)
    assert {peer: boxes[0].target for peer, boxes in plan.receives.items()} == {
        0: (Interval(1, 3),),
        2: (Interval(5, 7),),
        3: (Interval(7, 8),),
    }


def test_a_negative_halo_is_left_out():
    # 5 rows, kernel 1, stride 3: outputs 0 and 1 need rows 0 and 3; rank 0 owns 0..2, rank 1 owns 3..4.
    first, second = plans_of([DimPlan.of_window(5, 2, Window(1, 3))])
    assert first.buffer_shape == second.buffer_shape == (1,)
    assert first.is_view and second.is_view and not first.is_identity and not first.anyone_exchanges


def test_the_reference_cases_of_an_overlapping_strided_window():
    # 32 rows, kernel 5, stride 2, two ranks: 14 outputs; the second rank needs two rows more above and one less below.
    first, second = plans_of([DimPlan.of_window(32, 2, Window(5, 2))])
    assert first.dims[0].needed == (Interval(0, 17), Interval(14, 31))
    assert second.receives[0][0].source == (Interval(14, 16),)
    assert first.receives[1][0].source == (Interval(0, 1),)


def test_equal_plans_are_equal_and_made_once():
    dims = (DimPlan.of_window(9, 2, Window(3)), DimPlan.of_window(7, 3, Window(3, 2)))
    again = (DimPlan.of_window(9, 2, Window(3)), DimPlan.of_window(7, 3, Window(3, 2)))
    assert HaloPlan(dims, (1, 2)) == HaloPlan(again, (1, 2)) != HaloPlan(dims, (1, 1))
    assert hash(HaloPlan(dims, (1, 2))) == hash(HaloPlan(again, (1, 2)))
    assert HaloPlan.of(dims, (1, 2)) is HaloPlan.of(again, (1, 2))


def test_a_printed_plan_names_peers_boxes_and_padding():
    text = str(HaloPlan((DimPlan.of_window(8, 2, Window(3, padding=(1, 1))),), (1,)))
    assert "rank 1 of 2" in text and "owns 4..7, needs 3..8" in text
    assert (
        "to rank 0   [0..0]" in text and "from rank 0 [3..3] -> buffer [0..0]" in text and "padding    [5..5]" in text
    )


def test_padding_that_reaches_too_far_is_refused_with_the_name_and_the_numbers():
    with pytest.raises(HaloError, match=r"conv1 .*'reflect'.* needs 4 indices beyond an image of 4.* at most 3"):
        DimPlan.of_window(4, 2, Window(3, padding=(4, 4)), "reflect", name="conv1")
    with pytest.raises(HaloError, match=r"'circular'.* needs 5 .* at most 4"):
        DimPlan.of_window(4, 2, Window(3, padding=(5, 5)), "circular")


def test_a_wrong_plan_is_refused():
    with pytest.raises(HaloError, match="Did you mean 'zeros'"):
        DimPlan(4, all_owned(4, 2), all_owned(4, 2), "zeroes")
    with pytest.raises(HaloError, match=r"cover 0\.\.4 in order, got 0\.\.1, 2\.\.3"):
        DimPlan(5, all_owned(4, 2), all_owned(4, 2))
    with pytest.raises(HaloError, match="needed indices for 2 parts, got 3"):
        DimPlan(4, all_owned(4, 2), all_owned(4, 3))
    with pytest.raises(HaloError, match=r"place in a grid of \(2,\), got \(2,\)"):
        HaloPlan((DimPlan(4, all_owned(4, 2), all_owned(4, 2)),), (2,))
