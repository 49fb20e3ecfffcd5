"""Agreement: ranks compare what they are about to do together, before anything is sent.

Every collective operation begins here. Ranks exchange one integer, a fingerprint of the operation and of everything
that they must have alike. Equal fingerprints cost one tiny message. Unequal ones lead every rank into the same slow
path, where they exchange what they were asked to do, and raise the same error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torchmn.communicators import plain
from torchmn.communicators.checks import fingerprint
from torchmn.communicators.watchdog import Wait, here, ranks_text, user_line
from torchmn.errors import ArgumentError, MismatchError, TorchMNError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

_SHOWN = 200  # characters of a value, in a disagreement
_NUMBER_BITS = (1 << 56) - 1
_ODD = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all bits


class Operation(NamedTuple):
    """A collective operation, and the names of what ranks must have alike in it."""

    name: str
    same: tuple[str, ...] = ()
    ragged: bool = False  # its `differ` are shapes: inside another agreement they are taken to be alike


class Noted:
    """What the next agreements carry beside their own values, on behalf of another layer: see `Communicator.noting`."""

    __slots__ = ("_comm", "_outer", "call", "note", "notes", "number", "optional")

    def __init__(self, comm: Communicator, note: int, number: int, call: str, optional: bool):
        self._comm = comm
        self.note = note
        self.number = number
        self.call = call
        self.optional = optional
        self.notes: Sequence[int | None] = (note,)

    def __enter__(self) -> Noted:
        self._outer, self._comm._noted = self._comm._noted, self
        return self

    def __exit__(self, *_: object) -> None:
        self._comm._noted = self._outer


class Agreement:
    """One collective operation of all ranks of `comm`: a context in which they have compared it.

    It holds the watchdog's note. Inside of it, operations of the same communicator neither compare nor note again: all
    ranks must pass tensors of the same shapes to them.

    Attributes:
        alike: whether all ranks passed exactly the same; where nothing was compared, it is assumed.
        differ: every rank's `differ`, in rank order.
        payloads: every rank's `payload`, in rank order, valid until the next agreement; None if it did not travel.

    Raises:
        ArgumentError: on every rank, if one has a `problem`.
        MismatchError: on every rank, naming each rank's values and line, if the operation or `values` differ.
    """

    __slots__ = (
        *("_agreed_before", "_comm", "_differ", "_operation", "_outer", "_payload", "_problem", "_statements"),
        *("_values", "_wait", "payloads"),
    )

    def __init__(
        self,
        comm: Communicator,
        operation: Operation,
        problem: str | None = None,
        values: Any = (),
        differ: Any = None,
        payload: Tensor | None = None,
        agreed_before: bool = False,
    ):
        self._comm = comm
        self._operation = operation
        self._problem = problem
        self._values = values
        self._differ = differ
        self._payload = payload
        self.payloads: list[Tensor] | None = None
        self._agreed_before = agreed_before
        self._statements: Sequence[Statement] | None = None

    @property
    def alike(self) -> bool:
        return self._statements is None

    @property
    def differ(self) -> list[Any]:
        if self._statements is None:
            return [self._differ] * self._comm.size
        return [statement.differ for statement in self._statements]

    def __enter__(self) -> Agreement:
        comm = self._comm
        self._outer = outer = comm._agreement
        self._wait: Wait | None = None
        if outer is not None and comm._owner is here.mark:
            self._compare(agreed_before=True)
        else:
            self._wait = wait = Wait(comm, self._operation.name)  # raises in a thread that is not the owner
            wait.__enter__()
            try:
                self._compare(self._agreed_before)
            except BaseException:
                wait.__exit__()
                raise
        comm._agreement = self
        return self

    def __exit__(self, *_: object) -> None:
        self._comm._agreement = self._outer
        if self._wait is not None:
            self._wait.__exit__()

    def _compare(self, agreed_before: bool) -> None:
        comm, problem, noted = self._comm, self._problem, self._comm._noted
        comm._check_open(self._operation.name)
        if comm._edges.unneeded:
            comm._edges.say_unneeded(comm)
        comm._collectives += 1
        compares = comm.settings.checks and not agreed_before
        if problem and (comm.size == 1 or not compares):
            raise ArgumentError(f"rank {comm.rank} of {comm.size}: {self._operation.name}: {problem}")
        ragged = agreed_before and self._operation.ragged
        differs = self._differ is not None and not ragged
        exchanges = compares or differs or (noted is not None and not noted.optional)
        if comm.size == 1 or not exchanges:
            return
        if problem:  # a number that no other rank has, so that the comparison fails on all
            number = -1 - comm.rank
        else:
            number = self._fingerprint()
            if noted is not None:  # not through the cache: every call has another one
                number = number + (noted.number << 2 | noted.note) * _ODD & _NUMBER_BITS
        if self._payload is None:
            alike = comm._same_everywhere(number)
        else:
            alike = comm._same_everywhere_carrying(number, self._payload)
        if not alike:
            self._exchange_statements(noted)
        if self._payload is not None:
            self.payloads = comm._carried_parts(self._payload)

    def _fingerprint(self) -> int:
        try:
            return fingerprint((self._operation, self._values, self._differ))
        except TypeError:  # lists and dicts have no hash
            return fingerprint((self._operation, repr(self._values), repr(self._differ)))

    def _exchange_statements(self, noted: Noted | None) -> None:
        """Exchange what each rank was asked to do; raise on all ranks if that cannot work."""
        comm, operation, problem = self._comm, self._operation.name, self._problem
        if noted is not None:
            operation = f"{operation} ({noted.call})"
        # Without checks the values were not asked for.
        same = {} if problem else dict(zip(self._operation.same, self._values, strict=bool(self._values)))
        where = user_line(sys._getframe(1))
        mine = (operation, plain.encode(same, repr).decode(), self._differ, problem, where, noted and noted.note)
        statements = [Statement.of(*told) for told in comm._allgather_plain(mine)]
        raise_disagreement(statements, comm.rank)
        self._statements = statements
        if noted is not None:
            noted.notes = [statement.note for statement in statements]


@dataclass
class Statement:
    """What one rank was asked to do, as all ranks learn it once their fingerprints differ."""

    operation: str
    same: dict[str, Any]
    differ: Any
    problem: str | None
    where: str
    note: int | None

    @staticmethod
    def of(operation: str, same: str, differ: Any, problem: str | None, where: str, note: int | None) -> Statement:
        return Statement(operation, plain.decode(same.encode()), differ, problem, where, note)

    def text(self, everyone: Sequence[Statement], shown: Callable[[Any], str] = str) -> str:
        """What this rank was asked to do; of long values, only where they differ from those of `everyone`."""
        details = [
            f"{name} {_short(value, [other.same[name] for other in everyone if name in other.same], shown)}"
            for name, value in self.same.items()
        ]
        return f"{self.operation}({', '.join(details)})  at {self.where}"


def raise_disagreement(statements: Sequence[Statement], rank: int) -> None:
    """Raise, on every rank alike, if a rank's argument is wrong or if what must be the same is not."""
    size = len(statements)
    wrong = [(culprit, s) for culprit, s in enumerate(statements) if s.problem]
    if wrong:
        lines = [f"rank {culprit} of {size}: {s.operation}: {s.problem}  (at {s.where})" for culprit, s in wrong]
        if all(culprit != rank for culprit, _ in wrong):
            lines.append(f"(raised on rank {rank} too, because its {statements[rank].operation} needs that rank)")
        raise ArgumentError("\n".join(lines))
    first = statements[0]
    if all((s.operation, s.same) == (first.operation, first.same) for s in statements):
        return
    texts: dict[str, list[int]] = {}
    alike = len({statement.text(statements) for statement in statements}) == 1  # 1 and "1"
    for speaker, statement in enumerate(statements):
        texts.setdefault(statement.text(statements, repr if alike else str), []).append(speaker)
    what = (
        "call different operations" if len({s.operation for s in statements}) > 1 else f"disagree in {first.operation}"
    )
    lines = [f"rank {rank} of {size}: ranks {what}; nothing was sent:"]
    lines += [f"  rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {text}" for text, ranks in texts.items()]
    lines.append("All ranks of a communicator must call the same operation, in the same order, with these alike.")
    raise MismatchError("\n".join(lines))


def _common_start(sequences: Sequence[Any]) -> int:
    """How many items, or letters, are the same at the start of all sequences."""
    for place, items in enumerate(zip(*sequences, strict=False)):
        if any(item != items[0] for item in items):
            return place
    return min(map(len, sequences))


def _short(value: Any, everyones: Sequence[Any], shown: Callable[[Any], str]) -> str:
    """The text of a value, if it is short; else what is not the same in everyone's (this one among them)."""
    text = shown(value)
    if len(text) <= _SHOWN:
        return text
    if all(each == value for each in everyones):
        return "the same on all ranks"
    if all(isinstance(each, list | tuple) for each in everyones):
        odd = [str(item) for item in value if not all(item in each for each in everyones)]
        what = "not alike: " + ", ".join(odd) if odd else f"which differ from place {_common_start(everyones)} on"
        text = f"{len(value)} of them, {what}"
    elif all(isinstance(each, str) for each in everyones):
        text = "..." + text[max(0, _common_start(everyones) - 40) :]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def by_rank(what: str, texts: dict[int, str], hosts: Sequence[str] | None = None) -> list[str]:
    """One line per text, with the ranks that have it, and their host: `ranks 0-2 <what>, on <host>: <text>`."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(("" if hosts is None else f", on {hosts[rank]}", text), []).append(rank)
    return [
        f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} {what}{host}: {text}"
        for (host, text), ranks in ranks_of.items()
    ]


def failure_text(failure: Exception) -> str:
    """What other ranks learn of an exception; of one that may be a fault of the program, its type and line, too."""
    if isinstance(failure, OSError | ValueError | TorchMNError):
        return str(failure)
    last = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {failure}  (at {last.filename}:{last.lineno} in {last.name})"


def attempt(
    comm: Communicator, operation: str, work: Callable[[], Any], root: int | None, raises: type[TorchMNError]
) -> list[Any]:
    """See `Communicator.attempt`."""
    result, failure = None, None
    if root is None or comm.rank == root:
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must raise, too
            failure = error
    mine = None if failure is None else (failure_text(failure), isinstance(failure, TorchMNError))
    with comm.agreed(operation):
        told = comm._allgather_plain(mine)
        problems = {rank: problem for rank, problem in enumerate(told) if problem is not None}
        if problems:
            (text, complete), *others = set(problems.values())
            if complete and not others and len(problems) == (comm.size if root is None else 1):
                # All that worked failed alike, with an error of ours, which needs no more words.
                raise failure or raises(text)
            hosts = comm._place.hosts if comm.inter_size > 1 else None  # each may have files of its own
            lines = {rank: f"{operation}: {text}" for rank, (text, _) in problems.items()}
            raise raises("\n".join(by_rank(f"of {comm.size}", lines, hosts))) from failure
        if root is not None:
            return [comm.bcast_obj(result, root)]
        return comm.allgather_obj(result)  # type: ignore[return-value]
