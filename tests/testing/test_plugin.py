"""`torchmn.testing.ranks` in a project of a user: each size is a test, which every rank runs."""

from __future__ import annotations

import pytest

from torchmn import run_threads  # imports torch, which a process cannot do again after `runpytest` has removed it
from torchmn.testing import ranks

assert run_threads
pytest_plugins = ["pytester"]

# Where TorchMN is installed, pytest loads the plugin without this line.
CONFTEST = 'pytest_plugins = ["torchmn.testing.plugin"]'


def project(pytester: pytest.Pytester, text: str) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")
    pytester.makepyfile(test_sums=f"import pytest\nimport torch\nfrom torchmn.testing import ranks\n{text}")
    return pytester


SUM = """
@pytest.fixture
def one():
    return torch.ones(3)

@pytest.mark.parametrize("factor", [1.0, 2.5])
@ranks(1, 2, 4)
def test_sum(comm, one, factor):
    assert comm.allreduce(factor * one).tolist() == [factor * comm.size] * 3

class TestClass:
    @ranks(2)
    def test_method(self, comm):
        assert comm.allgather_obj(comm.rank) == [0, 1]

def test_alone():
    pass
"""


def test_each_size_is_a_test_that_every_rank_runs(pytester):
    result = project(pytester, SUM).runpytest("-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["*::test_sum[[]threads-4-2.5] PASSED*"])


def test_a_rank_that_fails_fails_the_test_and_frees_the_others(pytester):
    text = """
@ranks(3)
def test_wrong(comm):
    assert comm.rank != 1, "rank 1 is wrong"
    comm.barrier()

@ranks(2)
def test_skipped(comm):
    pytest.skip("not today")
"""
    result = project(pytester, text).runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*rank 1 is wrong*"])


def test_a_wait_without_end_fails_with_the_table(pytester):
    text = """
@ranks(2, timeout=1)
def test_waits(comm):
    if comm.rank == 0:
        comm.recv(1)
    else:
        comm.recv(0)
"""
    result = project(pytester, text).runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0*recv*"])


@pytest.mark.timeout(300)
def test_processes_run_the_test_over_mpi_or_gloo(pytester):
    text = """
@pytest.mark.parametrize("factor", [3.0])
@ranks(2, on="mpi", timeout=30)
def test_sum(comm, factor, tmp_path):
    assert not comm.traits.shares_process
    assert len(set(comm.allgather_obj(str(tmp_path)))) == 2, "each process has its own fixtures"
    assert comm.allreduce(torch.tensor([factor])).item() == 2 * factor

@ranks(2, on="gloo", timeout=30)
def test_wrong(comm):
    assert comm.rank != 1, "rank 1 is wrong"
    comm.barrier()
"""
    result = project(pytester, text).runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 is wrong*"])


def test_a_test_without_comm_is_an_error(pytester):
    result = project(pytester, "@ranks(2)\ndef test_nothing():\n    pass\n").runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*to have an argument `comm`*"])


def test_wrong_sizes_and_transports_are_refused():
    for arguments, options in (((), {}), ((0,), {}), ((2,), {"on": "mpich"}), (("2",), {}), ((2,), {"on": ()})):
        with pytest.raises(ValueError, match="@ranks: expected"):
            ranks(*arguments, **options)


def test_loading_the_plugin_does_not_import_torch(pytester):
    code = "import sys, torchmn.testing.plugin; sys.exit('torch' in sys.modules)"
    assert pytester.runpython_c(code).ret == 0
