"""Records which agreements ranks enter: for tests of what communicates, and of the watchdog's report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from unittest.mock import patch

from torchmn.communicators.agreement import Agreement


@contextmanager
def recorded_agreements() -> Iterator[list[str]]:
    """A list that gets the name of each operation in which a rank of this process compares, and has a note."""
    names: list[str] = []
    compare = Agreement._compare

    def recording(agreement: Agreement, compared: bool) -> None:
        name, group = agreement.operation, agreement.group
        assert get_ident() in group.watch.waits, f"the watchdog does not see the wait in {name!r}"
        names.append(name)
        compare(agreement, compared)

    with patch.object(Agreement, "_compare", recording):
        yield names
