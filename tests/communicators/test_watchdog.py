"""The watchdog's report, and the thread world's timeout and errors."""

from __future__ import annotations

import _thread
import signal
import threading
from dataclasses import replace

import pytest

import torchmn
from torchmn.communicators.watchdog import report, source_lines
from torchmn.communicators.watchdog.waits import RankState

WORLD = (0, 1, 2)


def receiving(rank: int, source: int) -> RankState:
    return RankState(rank, "a", "recv", "world", peer=source, tag=4, members=WORLD, seconds=7.0, where=f"f.py:{rank}")


def meeting(rank: int, operation: str = "allreduce", sequence: int = 5) -> RankState:
    return RankState(rank, "a", operation, "world", sequence, members=WORLD, seconds=7.0, where=f"f.py:{rank}")


def computing(rank: int) -> RankState:
    return RankState(rank, "a", "", where=f"f.py:{rank}")


@pytest.mark.parametrize(
    ("states", "ring"),
    [
        ([receiving(0, 1), receiving(1, 0), computing(2)], [0, 1, 0]),
        ([receiving(0, 1), receiving(1, 2), receiving(2, 1)], [1, 2, 1]),
        ([receiving(2, 0), receiving(1, 2), receiving(0, 1)], [0, 1, 2, 0]),
        ([receiving(0, 1), meeting(1), meeting(2)], [0, 1, 0]),
        ([meeting(0), meeting(1, "bcast"), computing(2)], [0, 1, 0]),
        ([meeting(0), meeting(1, sequence=6), computing(2)], [0, 1, 0]),
        ([meeting(0), meeting(1), computing(2)], []),
        ([receiving(0, 1), receiving(1, 2), computing(2)], []),
        ([computing(0), computing(1), computing(2)], []),
    ],
)
def test_a_ring_of_waiting_ranks_is_found_and_starts_with_its_smallest(states: list, ring: list[int]) -> None:
    assert report.cycle(states) == ring


def test_the_table_shows_every_rank_and_names_those_that_the_others_wait_for() -> None:
    text = report.table([meeting(0), RankState(1, "", "", left=True), computing(2)], "the reason")
    lines = text.splitlines()
    assert lines[0] == "torchmn: the reason"
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert "allreduce" in lines[2] and "f.py:0" in lines[2]
    assert "left" in lines[3]
    assert "user code" in lines[4] and "f.py:2" in lines[4]
    assert lines[-2] == "the others wait for ranks 1-2"
    assert "equally often" in lines[-1]  # since one has left


def test_the_advice_below_the_table_fits_a_rank_that_was_lost() -> None:
    text = report.table([meeting(0), RankState(1, "", "", left=True, lost=True), meeting(2)], "the reason")
    assert text.splitlines()[3].split() == ["1", "lost"]
    assert "killed or crashed" in text
    assert "equally often" not in text


def test_only_waits_that_last_from_one_sample_to_the_next_are_a_deadlock() -> None:
    waiting = [receiving(0, 1), receiving(1, 0)]
    assert report.lasting_cycle(waiting, waiting) == [0, 1, 0]
    works_through_its_messages = [receiving(0, 1), replace(receiving(1, 0), seconds=0.0, since=8.0)]
    assert report.cycle(works_through_its_messages) == [0, 1, 0]
    assert report.lasting_cycle(waiting, works_through_its_messages) == []


def test_the_line_of_the_user_is_the_innermost_that_is_not_ours() -> None:
    assert "test_watchdog.py" in source_lines.user_line()


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6")])
def test_ranks_are_written_as_spans(ranks: list[int], text: str) -> None:
    assert report.ranks_text(ranks) == text


def test_in_the_thread_world_a_deadlock_is_raised_to_the_caller() -> None:
    with pytest.raises(torchmn.WaitTimeout, match="deadlock: rank 0 waits for rank 1 waits for rank 0") as caught:
        torchmn.run_threads(lambda comm: comm.recv(1 - comm.rank), 2, timeout=0.3)
    assert "test_watchdog.py" in str(caught.value)


def test_in_the_thread_world_a_rank_that_ends_frees_the_one_that_waits_for_it() -> None:
    with pytest.raises(torchmn.PeerError, match="rank 1 ended while rank 0 waits for it"):
        torchmn.run_threads(lambda comm: comm.recv(1) if comm.rank == 0 else None, 2)


def test_in_the_thread_world_an_exception_frees_the_others_and_reaches_the_caller() -> None:
    def body(comm: torchmn.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        torchmn.run_threads(body, 3)


def test_in_the_thread_world_an_interrupt_of_the_caller_ends_the_ranks() -> None:
    ended = [threading.Event(), threading.Event()]

    def main(comm) -> None:
        try:
            comm.barrier()  # both are running
            if comm.rank == 0:
                _thread.interrupt_main()
            comm.recv(1 - comm.rank)
        finally:
            ended[comm.rank].set()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            torchmn.run_threads(main, 2, timeout=60)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert all(each.wait(20) for each in ended)


def test_run_threads_returns_the_results_in_rank_order() -> None:
    assert torchmn.run_threads(lambda comm: comm.rank * 10, 4) == [0, 10, 20, 30]


@pytest.mark.parametrize(("size", "hosts"), [(0, None), (2, ["a"]), (-1, None)])
def test_run_threads_refuses_a_size_that_cannot_be(size: int, hosts: list[str] | None) -> None:
    with pytest.raises(torchmn.ArgumentError, match="run_threads"):
        torchmn.run_threads(lambda comm: None, size, hosts)


def test_an_agreement_is_in_the_table() -> None:
    def body(comm: torchmn.Communicator) -> None:
        if comm.rank == 0:
            comm.agree("a lonely comparison")
        comm.recv(0)

    with pytest.raises(torchmn.WaitTimeout, match=r"a lonely comparison +all"):
        torchmn.run_threads(body, 2, timeout=0.3)
