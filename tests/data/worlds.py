"""Marks for tests of data sets: several numbers of ranks on threads, and once with processes."""

from tests._worlds.marks import TestBody, ranks

ACROSS = ("mpi", "gloo")


def small_worlds(body: TestBody) -> TestBody:
    """Runs a test at 1, 2, 3 and 4 ranks as threads, and on 3 processes over MPI and over gloo."""
    return ranks(1, 2, 3, 4, on="threads")(ranks(3, on=ACROSS)(body))


def small_worlds_of_several(body: TestBody) -> TestBody:
    """Runs a test as `small_worlds` does, but not on one rank."""
    return ranks(2, 3, 4, on="threads")(ranks(3, on=ACROSS)(body))
