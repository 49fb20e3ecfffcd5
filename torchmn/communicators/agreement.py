"""`Agreement`, in which ranks compare the arguments of a collective operation before anything is sent.

Every collective operation begins with one. Ranks compare one integer, a fingerprint of the operation and of all values
that must be equal, which takes one small message. If fingerprints differ, every rank takes the same slow path, where
they exchange the values themselves and raise the same error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torchmn._torch_compat import ProfilerRange, is_profiling
from torchmn.communicators.arguments import describe, fingerprint
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import plain_values
from torchmn.communicators.replies import Replies
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.communicators.watchdog.source_lines import user_line
from torchmn.communicators.watchdog.waits import Wait
from torchmn.context import here
from torchmn.errors import ArgumentError, MismatchError, TorchMNError

_NOT_PLAIN = (Tensor, np.ndarray)  # their `repr` leaves out most elements
_SHOWN = 200  # characters of a value in an error message
_FINGERPRINT_MASK = (1 << 56) - 1
_HASH_FACTOR = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all bits


class Operation(NamedTuple):
    """A collective operation, and the names of the values that must be equal on all ranks.

    Attributes:
        name: for messages.
        same: names of the values.
        ragged: whether `differ` is a shape. Inside another agreement, shapes are assumed to be equal.
        lazy: whether values may be functions that return them.
    """

    name: str
    same: tuple[str, ...] = ()
    ragged: bool = False
    lazy: bool = False


class Agreements:
    """State that the agreements of one communicator share.

    Attributes:
        current: the agreement in whose body this rank is.
        note: piggybacked on the next comparisons.
    """

    def __init__(self, buffers: Buffers, replies: Replies):
        self.group = buffers.transport.group
        self.transport = buffers.transport
        self.buffers = buffers
        self.replies = replies
        self.current: Agreement | None = None
        self.note: PiggybackNote | None = None


class Piggyback:
    """Adds a number of another layer, such as `functions`, to the comparisons of agreements, without a message.

    Attributes:
        calls: number of operations that the layer has numbered; the same on all ranks.
    """

    def __init__(self, agreements: Agreements):
        self._agreements = agreements
        self.calls = 0

    @property
    def active(self) -> bool:
        """Whether an operation of that layer is running."""
        return self._agreements.note is not None

    def __call__(self, note: int, number: int, call: str, optional: bool = False) -> PiggybackNote:
        """Returns a context whose agreements compare these, too.

        Args:
            note: 0 to 3; may differ between ranks. If it does, `PiggybackNote.notes` has those of all ranks afterwards.
            number: must be equal on all ranks.
            call: description of the number, for messages.
            optional: whether it is left out if ranks do not compare anyway.
        """
        return PiggybackNote(self._agreements, note, number, call, optional)


class PiggybackNote:
    """A number that the agreements in this context compare for another layer: see `Piggyback`."""

    __slots__ = ("_agreements", "_outer", "call", "note", "notes", "number", "optional")

    def __init__(self, agreements: Agreements, note: int, number: int, call: str, optional: bool):
        self._agreements = agreements
        self.note = note
        self.number = number
        self.call = call
        self.optional = optional
        self.notes: Sequence[int | None] = (note,)

    def __enter__(self) -> PiggybackNote:
        self._outer, self._agreements.note = self._agreements.note, self
        return self

    def __exit__(self, *_: object) -> None:
        self._agreements.note = self._outer


class Agreement(Wait):
    """A context in which all ranks of a communicator are in the same operation and have compared its arguments.

    It is also the `Wait` of the operation. Inside of it, operations of the same communicator neither compare nor
    register a wait: all ranks must pass tensors of the same shapes to them.

    Args:
        agreements: of the communicator.
        operation: its name, and the names of `values`.
        problem: why this rank cannot take part, or None.
        values: must be equal on all ranks; or functions that return them, called only if ranks compare.
        differ: a plain value (see `plain_values.encode`) that may differ between ranks. Ranks exchange it even if
            checks are off.
        payload: a tensor that may piggyback on the comparison.
        compared: whether ranks have compared all of this elsewhere.
        optional: whether `differ` is exchanged only if checks are on.

    Attributes:
        alike: whether all ranks passed equal values; assumed if nothing was compared.
        differ: every rank's `differ`, in rank order.
        payloads: every rank's `payload`, in rank order, valid until the next agreement; None if it was not exchanged.

    Raises:
        ArgumentError: on every rank, if one has a `problem`.
        MismatchError: on every rank, naming each rank's values and line, if the operation or `values` differ.
    """

    __slots__ = (
        *("_agreements", "_compared", "_definition", "_differ", "_nested", "_optional", "_outer", "_payload"),
        *("_problem", "_statements", "_values", "payloads"),
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
        self._definition = operation
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
            super().__enter__()  # raises if another thread is the owner
        try:
            if self._nested or not is_profiling():
                self._compare(self._nested or self._compared)
            else:
                with ProfilerRange("torchmn::agreement"):
                    self._compare(self._compared)
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
        if self._definition.lazy:
            self._evaluate(compares)
        number, carrier, payload = self._fingerprint(), agreements.transport.carrier, None
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
        """Calls the functions among the values, if ranks compare; drops the values otherwise."""
        if self._problem or not compares:
            self._values = ()
            return
        values = []
        for name, given in zip(self._definition.same, self._values, strict=True):
            value = given() if callable(given) else given
            values.append(value)
            if isinstance(value, _NOT_PLAIN):
                text = f"expected {name} to be a plain value, got {describe(value)}: compare a number or a digest of it"
                self._problem = self._problem or text
        self._values = tuple(values)

    def _exchanges_anyway(self, compared: bool) -> bool:
        """Returns whether ranks exchange something although they do not compare."""
        if self.group.size == 1:
            return False
        note, assumed = self._agreements.note, self._optional or (compared and self._definition.ragged)
        return (self._differ is not None and not assumed) or (note is not None and not note.optional)

    def _fingerprint(self) -> int:
        """Returns the number that ranks compare."""
        if self._problem:  # differs from those of all other ranks, so that the comparison fails
            return -1 - self.group.rank
        try:
            number = fingerprint((self._definition, self._values, self._differ))
        except TypeError:  # lists and dicts have no hash
            number = fingerprint((self._definition, repr(self._values), repr(self._differ)))
        note = self._agreements.note
        if note is not None:  # outside of the cache of fingerprints, because it changes with every call
            number = number + (note.number << 2 | note.note) * _HASH_FACTOR & _FINGERPRINT_MASK
        return number

    def _exchange_statements(self) -> None:
        """Exchanges the operation and values of each rank; raises on all ranks if they do not match."""
        operation, problem, note = self.operation, self._problem, self._agreements.note
        if note is not None:
            operation = f"{operation} ({note.call})"
        same = {} if problem else dict(zip(self._definition.same, self._values, strict=bool(self._values)))
        values = plain_values.encode(same, repr).decode()
        statement = (operation, values, self._differ, problem, user_line(), note and note.note)
        statements = [Statement.of(*each) for each in self._agreements.buffers.allgather_plain(statement)]
        raise_disagreement(statements, self.group.rank)
        self._statements = statements
        if note is not None:
            note.notes = [statement.note for statement in statements]


@dataclass
class Statement:
    """Operation and values of one rank, which ranks exchange if their fingerprints differ."""

    operation: str
    same: dict[str, Any]
    differ: Any
    problem: str | None
    where: str
    note: int | None

    @staticmethod
    def of(operation: str, same: str, differ: Any, problem: str | None, where: str, note: int | None) -> Statement:
        return Statement(operation, plain_values.decode(same.encode()), differ, problem, where, note)

    def text(self, statements: Sequence[Statement], shown: Callable[[Any], str] = str) -> str:
        """Returns the call of this rank; of long values, only the difference from those of all `statements`."""
        details = [
            f"{name} {_short(value, [each.same[name] for each in statements if name in each.same], shown)}"
            for name, value in self.same.items()
        ]
        return f"{self.operation}({', '.join(details)})  at {self.where}"


def raise_disagreement(statements: Sequence[Statement], rank: int) -> None:
    """Raises, on every rank, if the argument of a rank is wrong or values that must be equal are not."""
    size = len(statements)
    wrong = [(number, s) for number, s in enumerate(statements) if s.problem]
    if wrong:
        lines = [f"rank {number} of {size}: {s.operation}: {s.problem}  (at {s.where})" for number, s in wrong]
        if all(number != rank for number, _ in wrong):
            lines.append(f"(raised on rank {rank} too, because its {statements[rank].operation} needs that rank)")
        raise ArgumentError("\n".join(lines))
    first = statements[0]
    if all((s.operation, s.same) == (first.operation, first.same) for s in statements):
        return
    texts: dict[str, list[int]] = {}
    ambiguous = len({statement.text(statements) for statement in statements}) == 1  # 1 and "1"
    for number, statement in enumerate(statements):
        texts.setdefault(statement.text(statements, repr if ambiguous else str), []).append(number)
    what = (
        "call different operations" if len({s.operation for s in statements}) > 1 else f"disagree in {first.operation}"
    )
    lines = [f"rank {rank} of {size}: ranks {what}; nothing was sent:"]
    lines += [f"  rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {text}" for text, ranks in texts.items()]
    lines.append("All ranks of a communicator must call the same operation, in the same order, with equal values.")
    raise MismatchError("\n".join(lines))


def _common_start(sequences: Sequence[Any]) -> int:
    """Returns the length of the common prefix of all sequences."""
    for index, items in enumerate(zip(*sequences, strict=False)):
        if any(item != items[0] for item in items):
            return index
    return min(map(len, sequences))


def _short(value: Any, values: Sequence[Any], shown: Callable[[Any], str]) -> str:
    """Returns the text of a value if it is short; otherwise its difference from `values`, those of all ranks."""
    text = shown(value)
    if len(text) <= _SHOWN:
        return text
    if all(each == value for each in values):
        return "the same on all ranks"
    if all(isinstance(each, list | tuple) for each in values):
        odd = [str(item) for item in value if not all(item in each for each in values)]
        which = "of which differ: " + ", ".join(odd) if odd else f"which differ from index {_common_start(values)} on"
        text = f"{len(value)} items, {which}"
    elif all(isinstance(each, str) for each in values):
        text = "..." + text[max(0, _common_start(values) - 40) :]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def lines_by_rank(suffix: str, texts: dict[int, str], hosts: Sequence[str] | None = None) -> list[str]:
    """Returns a line per text, with the ranks that have it and their host: `ranks 0-2 <suffix>, on <host>: <text>`."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(("" if hosts is None else f", on {hosts[rank]}", text), []).append(rank)
    return [
        f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} {suffix}{host}: {text}"
        for (host, text), ranks in ranks_of.items()
    ]


def failure_text(failure: Exception) -> str:
    """Returns the text of an exception for other ranks; with type and line, unless it is an error of input or files."""
    if isinstance(failure, OSError | ValueError | TorchMNError):
        return str(failure)
    last = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {failure}  (at {last.filename}:{last.lineno} in {last.name})"
