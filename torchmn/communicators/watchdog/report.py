"""The text of the watchdog's report: why a job is ended, a table of what each rank does, and which ranks are missing.

`table` formats the `RankState` of each rank. Other layers add lines below the table by an entry in `waits.sections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchmn.communicators.watchdog.waits import RankState, sections

# -- why the job is ended --------------------------------------------------------------------------------------


def timeout_reason(rank: int, seconds: float, operation: str) -> str:
    """Returns the reason of a rank whose wait exceeded the timeout."""
    return f"rank {rank} has waited for {seconds:g} s in {operation}; the job is ended"


def exit_reason(rank: int, seconds: float, unfinished: str) -> str:
    """Returns the reason of a rank whose script has ended, and whose process has not."""
    return f"the script of rank {rank} ended more than {seconds:g} s ago, but not {unfinished}; the job is ended"


def departure_reason(departures: Iterable[dict[str, Any]], rank: int, operation: str) -> str:
    """Returns the reason of a rank that waits for ranks which have left or were lost."""
    causes = "; ".join(departure_text(departure) for departure in departures)
    return f"{causes}; rank {rank} waits for it in {operation}; the job is ended"


def broken_reason(cause: str, rank: int, operation: str) -> str:
    """Returns the reason of a rank that waits in a communicator which another thread has broken."""
    return f"{cause}; rank {rank} waits in {operation} of that communicator; the job is ended"


def departure_text(departure: dict[str, Any]) -> str:
    """Returns a sentence on how a rank left or was lost, from its message on the control channel."""
    if departure["kind"] == "lost":
        how = "was lost (killed or crashed, or its host is cut off)"
    elif departure.get("status"):
        how = f"left with status {departure['status']} (its script called sys.exit)"
    else:
        how = "left (its script ended or called sys.exit)"
    return f"rank {departure['rank']} {how}"


# -- the table -------------------------------------------------------------------------------------------------


def table(states: Sequence[RankState], reason: str, ring: Sequence[int] = ()) -> str:
    """Returns the report: the reason, a row per rank, and the deadlock or the missing ranks.

    Args:
        states: of all ranks.
        reason: why the job is ended.
        ring: from `lasting_cycle`.
    """
    rows = [("rank", "host", "operation", "with", "tag", "seconds", "at")]
    rows += [_row(state, states) for state in sorted(states, key=lambda state: state.rank)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"torchmn: {reason}"]
    lines += ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if ring:
        lines.append("deadlock: " + " waits for ".join(f"rank {rank}" for rank in ring))
    else:
        lines += _missing(states)
    for name, section in sections.items():
        lines += section.lines({state.rank: state.reports[name] for state in states if name in state.reports})
    return "\n".join(lines)


def _row(state: RankState, states: Sequence[RankState]) -> tuple[str, ...]:
    if state.left:
        return (str(state.rank), state.host, "lost" if state.lost else "left", "", "", "", state.where)
    if not state.operation:
        return (str(state.rank), state.host, "user code", "", "", "", state.where or "no answer")
    if state.peer is not None:
        partner = f"rank {state.peer}"
    else:
        partner = "all" if len(state.members) == len(states) else f"ranks {ranks_text(state.members)}"
    tag = "" if state.tag is None else str(state.tag)
    return (str(state.rank), state.host, state.operation, partner, tag, f"{state.seconds:.1f}", state.where)


def _missing(states: Sequence[RankState]) -> list[str]:
    """Returns lines on the ranks that others wait for and that wait for no rank, with advice if one has gone."""
    waiting = [state for state in states if state.operation and not state.left]
    needed = {rank for state in states for rank in waits_for(state, states)}
    missing = sorted(needed - {state.rank for state in waiting})
    if not missing:
        return []
    lines = [f"the others wait for rank{'s' * (len(missing) > 1)} {ranks_text(missing)}"]
    silent = [state.rank for state in states if state.rank in missing and not (state.left or state.where)]
    if silent:
        lines.append(
            f"rank {ranks_text(silent)} does not answer: it is stopped (SIGSTOP), cut off from rank 0, or in native "
            "code that blocks Python."
        )
    gone = [state for state in states if state.left and state.rank in missing]
    if any(state.lost for state in gone):
        lines.append(
            "A lost rank was killed or crashed, or its host is cut off: see its last output, and `dmesg` on its host "
            "(the kernel kills processes when memory runs out)."
        )
    elif gone and any(state.peer is None for state in waiting):
        lines.append(
            "All ranks must make the same collective calls (steps, evaluations, saves), equally often: "
            "torchmn.scatter_dataset gives every rank equally many items."
        )
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns `0-2, 5` for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# -- the graph of waiting ranks --------------------------------------------------------------------------------


def waits_for(state: RankState, states: Sequence[RankState]) -> list[int]:
    """Returns the ranks that the rank of `state` needs before it can continue."""
    if state.left or not state.operation:
        return []
    if state.peer is not None:
        return [state.peer]
    by_rank = {other.rank: other for other in states}
    return [member for member in state.members if not _has_joined(by_rank.get(member), state)]


def _has_joined(other: RankState | None, state: RankState) -> bool:
    """Returns whether `other` has entered the same collective operation as `state`."""
    if other is None or other.left:
        return False
    same = other.communicator == state.communicator and other.peer is None and bool(other.operation)
    return same and other.sequence == state.sequence and other.operation == state.operation


def lasting_cycle(before: Sequence[RankState], after: Sequence[RankState]) -> list[int]:
    """Returns the ring of ranks that wait for each other in both samples, each in one and the same wait; else [].

    In a single sample, ranks that exchange messages may seem to wait for each other: it is not taken at one instant.
    """
    ring = cycle(after)
    waits = {state.rank: (state.operation, state.since) for state in before}
    lasts = all((state.operation, state.since) == waits.get(state.rank) for state in after if state.rank in ring)
    return ring if lasts else []


def cycle(states: Sequence[RankState]) -> list[int]:
    """Returns ranks that wait for each other in a ring, the smallest first and last; [] if there is none."""
    graph = {state.rank: waits_for(state, states) for state in states}
    finished: set[int] = set()
    for start in sorted(graph):
        ring = _find_cycle(graph, start, [], finished)
        if ring:
            smallest = ring.index(min(ring))
            return [*ring[smallest:-1], *ring[:smallest], ring[smallest]]
    return []


def _find_cycle(graph: dict[int, list[int]], rank: int, path: list[int], finished: set[int]) -> list[int]:
    if rank in path:
        return [*path[path.index(rank) :], rank]
    if rank in finished:
        return []
    path.append(rank)
    for needed in graph.get(rank, ()):
        found = _find_cycle(graph, needed, path, finished)
        if found:
            return found
    path.pop()
    finished.add(rank)
    return []
