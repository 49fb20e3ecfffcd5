"""Agreement: ranks compare what they are about to do together, before anything is sent.

Every collective operation begins here. Ranks exchange one integer, a fingerprint of the operation and of everything
that they must have alike. Equal fingerprints cost one tiny message. Unequal ones lead every rank into the same slow
path, where they exchange what they were asked to do, and raise the same error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torchmn.communicators.arguments import describe, fingerprint
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import plain_values
from torchmn.communicators.replies import Replies
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.communicators.watchdog.source_lines import user_line
from torchmn.communicators.watchdog.waits import Wait
from torchmn.context import here
from torchmn.errors import ArgumentError, MismatchError, TorchMNError

_NOT_PLAIN = (Tensor, np.ndarray)  # their texts leave out most elements
_SHOWN = 200  # characters of a value, in a disagreement
_NUMBER_BITS = (1 << 56) - 1
_ODD = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all bits


class Operation(NamedTuple):
    """A collective operation, and the names of what ranks must have alike in it."""

    name: str
    same: tuple[str, ...] = ()
    ragged: bool = False  # its `differ` are shapes: inside another agreement they are taken to be alike
    lazy: bool = False  # values may be functions that return them


class Agreements:
    """What the agreements of one communicator share.

    Attributes:
        current: the agreement in whose body this rank is.
        noted: what the next agreements carry on behalf of another layer.
    """

    def __init__(self, buffers: Buffers, replies: Replies):
        self.group = buffers.transport.group
        self.transport = buffers.transport
        self.buffers = buffers
        self.replies = replies
        self.current: Agreement | None = None
        self.noted: Noted | None = None


class Noting:
    """Makes contexts whose agreements carry a note on behalf of another layer, such as autograd.

    Attributes:
        calls: how many operations that layer has numbered; the same on all ranks.
    """

    def __init__(self, agreements: Agreements):
        self._agreements = agreements
        self.calls = 0

    def __call__(self, note: int, number: int, call: str, optional: bool = False) -> Noted:
        """Returns such a context.

        Args:
            note: 0 to 3; may differ between ranks. If it does, `Noted.notes` has all ranks' afterwards.
            number: must be the same on all ranks.
            call: the number in words, for messages.
            optional: carry it only where ranks compare anyway.
        """
        return Noted(self._agreements, note, number, call, optional)


class Noted:
    """What the next agreements carry beside their own values, on behalf of another layer: see `Communicator.noting`."""

    __slots__ = ("_agreements", "_outer", "call", "note", "notes", "number", "optional")

    def __init__(self, agreements: Agreements, note: int, number: int, call: str, optional: bool):
        self._agreements = agreements
        self.note = note
        self.number = number
        self.call = call
        self.optional = optional
        self.notes: Sequence[int | None] = (note,)

    def __enter__(self) -> Noted:
        self._outer, self._agreements.noted = self._agreements.noted, self
        return self

    def __exit__(self, *_: object) -> None:
        self._agreements.noted = self._outer


class Agreement(Wait):
    """One collective operation of all ranks of a communicator: a context in which they have compared it.

    It is the watchdog's note of that operation. Inside of it, operations of the same communicator neither compare nor
    note again: all ranks must pass tensors of the same shapes to them.

    Args:
        agreements: of the communicator.
        operation: its name, and the names of `values`.
        problem: why this rank cannot take part, or None.
        values: what must be equal on all ranks, or functions that return it, called only if ranks compare.
        differ: a plain value (see `plain.encode`) that may differ between ranks; with one, ranks exchange it even if
            checks are off.
        payload: a tensor that may travel with the comparison.
        compared: whether ranks have compared all of this elsewhere.
        optional: whether `differ` is exchanged only if checks are on.

    Attributes:
        alike: whether all ranks passed exactly the same; where nothing was compared, it is assumed.
        differ: every rank's `differ`, in rank order.
        payloads: every rank's `payload`, in rank order, valid until the next agreement; None if it did not travel.

    Raises:
        ArgumentError: on every rank, if one has a `problem`.
        MismatchError: on every rank, naming each rank's values and line, if the operation or `values` differ.
    """

    __slots__ = (
        *("_agreements", "_compared", "_differ", "_nested", "_optional", "_outer", "_payload", "_problem"),
        *("_statements", "_values", "_what", "payloads"),
    )

    def __init__(
        self,
        agreements: Agreements,
        operation: Operation,
        problem: str | None = None,
        values: Any = (),
        differ: Any = None,
        payload: Tensor | None = None,
        compared: bool = False,
        optional: bool = False,
    ):
        self.group = agreements.group
        self.operation = operation.name
        self.peer = self.tag = self.about = None
        self._agreements = agreements
        self._what = operation
        self._problem = problem
        self._values = values
        self._differ = differ
        self._payload = payload
        self._compared = compared
        self._optional = optional
        self.payloads: list[Tensor] | None = None
        self._statements: Sequence[Statement] | None = None

    @property
    def alike(self) -> bool:
        return self._statements is None

    @property
    def differ(self) -> list[Any]:
        if self._statements is None:
            return [self._differ] * self.group.size
        return [statement.differ for statement in self._statements]

    def __enter__(self) -> Agreement:
        agreements = self._agreements
        self._outer = agreements.current
        self._nested = self._outer is not None and self.group.owner is here.mark
        if not self._nested:
            super().__enter__()  # raises in a thread that is not the owner
        try:
            self._compare(self._nested or self._compared)
        except BaseException:
            if not self._nested:
                super().__exit__()
            raise
        agreements.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._agreements.current = self._outer
        if not self._nested:
            super().__exit__()

    def _compare(self, compared: bool) -> None:
        agreements, group = self._agreements, self.group
        if group.closed:
            group.check_open(self.operation)
        if agreements.replies.declined:
            agreements.replies.send_declined()
        group.collectives += 1
        compares = group.size > 1 and group.settings.checks and not compared
        if self._problem and not compares:
            raise ArgumentError(f"rank {group.rank} of {group.size}: {self.operation}: {self._problem}")
        if not compares and not self._exchanges_anyway(compared):
            return
        if self._what.lazy:
            self._evaluate(compares)
        number, carrier, payload = self._number(), agreements.transport.carrier, None
        if carrier is not None and self._payload is not None and not self._problem:
            payload = carrier.payload(self._payload)
        if carrier is not None and payload is not None:
            self.payloads = carrier.equal_carrying(number, payload)
            equal = self.payloads is not None
        else:
            equal = agreements.transport.equal(number)
        if not equal:
            self._exchange_statements()

    def _evaluate(self, compares: bool) -> None:
        """Calls the functions among the values, if ranks compare them; else drops the values."""
        if self._problem or not compares:
            self._values = ()
            return
        values = []
        for name, given in zip(self._what.same, self._values, strict=True):
            value = given() if callable(given) else given
            values.append(value)
            if isinstance(value, _NOT_PLAIN):
                what = f"expected {name} to be a plain value, got {describe(value)}: compare a number or a digest of it"
                self._problem = self._problem or what
        self._values = tuple(values)

    def _exchanges_anyway(self, compared: bool) -> bool:
        """Whether there is something to exchange though ranks do not compare."""
        if self.group.size == 1:
            return False
        noted, assumed = self._agreements.noted, self._optional or (compared and self._what.ragged)
        return (self._differ is not None and not assumed) or (noted is not None and not noted.optional)

    def _number(self) -> int:
        """The number that ranks compare."""
        if self._problem:  # one that no other rank has, so that the comparison fails on all
            return -1 - self.group.rank
        try:
            number = fingerprint((self._what, self._values, self._differ))
        except TypeError:  # lists and dicts have no hash
            number = fingerprint((self._what, repr(self._values), repr(self._differ)))
        noted = self._agreements.noted
        if noted is not None:  # not through the cache: every call has another one
            number = number + (noted.number << 2 | noted.note) * _ODD & _NUMBER_BITS
        return number

    def _exchange_statements(self) -> None:
        """Exchanges what each rank was asked to do; raises on all ranks if that cannot work."""
        operation, problem, noted = self.operation, self._problem, self._agreements.noted
        if noted is not None:
            operation = f"{operation} ({noted.call})"
        same = {} if problem else dict(zip(self._what.same, self._values, strict=bool(self._values)))
        where = user_line()
        mine = (operation, plain_values.encode(same, repr).decode(), self._differ, problem, where, noted and noted.note)
        statements = [Statement.of(*each) for each in self._agreements.buffers.allgather_plain(mine)]
        raise_disagreement(statements, self.group.rank)
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
        return Statement(operation, plain_values.decode(same.encode()), differ, problem, where, note)

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
