"""Random graphs over 2 to 5 ranks, with random payloads and micro-batches: the numbers of one process."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchmn
from tests.graph.replica import SHAPES, Spec, assert_equal_to_one_process


@st.composite
def graphs(draw) -> tuple[int, list[Spec]]:
    """A number of ranks, and components of which each may feed any later one, added in any order that fits."""
    size = draw(st.integers(2, 5))
    count = draw(st.integers(1, 8))
    homes = [draw(st.integers(0, size - 1)) for _ in range(count)]
    feeds = {n: [] for n in range(count)}  # giver -> takers
    takes = {n: [] for n in range(count)}
    for taker in range(1, count):
        # Between two ranks the n-th sent is the n-th received: a giver before the last one of that pair would cross it.
        for giver in sorted(draw(st.lists(st.integers(0, taker - 1), max_size=3))):
            if all(giver >= other for other in last_givers(feeds, homes, giver, taker)):
                feeds[giver].append(homes[taker])
                takes[taker].append(giver)
    specs = []
    for n in range(count):
        rank_in = [homes[giver] for giver in takes[n]] or draw(st.sampled_from([None, None, None, []]))
        rank_out = feeds[n] or None
        if rank_in and len(rank_in) == 1 and draw(st.booleans()):
            rank_in = rank_in[0]
        ignores = tuple(draw(st.sets(st.integers(0, 2), max_size=1)))
        specs.append(Spec(homes[n], rank_in, rank_out, draw(st.sampled_from(sorted(SHAPES))), ignores))
    return size, specs


def last_givers(feeds, homes, giver: int, taker: int) -> list[int]:
    """The components that feed the taker's rank from the giver's so far."""
    return [other for other, targets in feeds.items() if homes[other] == homes[giver] and homes[taker] in targets]


@given(graphs(), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_a_random_graph_gives_the_numbers_of_one_process(graph, arguments):
    size, specs = graph
    torchmn.run_threads(
        lambda comm: assert_equal_to_one_process(comm, specs, arguments=arguments, iterations=2), size, timeout=20
    )


@given(graphs(), st.integers(2, 5), st.integers(1, 9))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_a_random_graph_gives_the_same_numbers_in_micro_batches(graph, microbatches, rows):
    size, specs = graph
    specs = [spec._replace(rank_in=None) if spec.rank_in == [] else spec for spec in specs]
    torchmn.run_threads(
        lambda comm: assert_equal_to_one_process(comm, specs, microbatches=microbatches, rows=rows, iterations=2),
        size,
        timeout=20,
    )
