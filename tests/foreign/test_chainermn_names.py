"""The table of ChainerMN's public names: what exists can be used, and errors for the rest name the alternative."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch

import torchmn
from tests._worlds import ranks, run_job
from tests._worlds.jobs import without_package
from tests.docs.pages import page
from tests.foreign.tables import markdown
from torchmn.chainermn.names import NAMES, value
from torchmn.other_spellings import OtherName

BY_NAME = {entry.name: entry for entry in NAMES}
OF_COMMUNICATORS = [entry for entry in NAMES if entry.name.startswith("CommunicatorBase.")]
OF_OPTIMIZERS = [entry for entry in NAMES if entry.name.startswith("MultiNodeOptimizer.")]
OF_CHECKPOINTERS = [entry for entry in NAMES if entry.name.startswith("MultiNodeCheckpointer.")]
OF_MODULES = [entry for entry in NAMES if entry not in OF_COMMUNICATORS + OF_OPTIMIZERS + OF_CHECKPOINTERS]


def shown(entry: OtherName) -> str:
    return entry.name


def raised(owner: object, name: str) -> str:
    """The text of the error for a name."""
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    return str(caught.value)


@pytest.mark.parametrize("entry", OF_MODULES, ids=shown)
def test_a_name_of_a_module_exists_or_its_error_says_what_to_use(entry):
    module, _, name = entry.name.rpartition(".")
    if entry.here:
        owner = import_module(f"torchmn.{module}") if module else torchmn
        assert getattr(owner, name) is value(entry.here)
    elif not module:
        assert entry.note in raised(torchmn, name)
    else:
        assert entry.note in raised(getattr(torchmn, module), name)


@ranks(2, on="mpi")
def test_attributes_of_communicators_exist_or_their_error_says_what_to_use(comm):
    for entry in OF_COMMUNICATORS:
        name = entry.name.removeprefix("CommunicatorBase.")
        if entry.here:
            assert entry.here.startswith("Communicator.")
            getattr(comm, name)
            getattr(comm, entry.here.removeprefix("Communicator."))
        else:
            assert entry.note in raised(comm, name)


def test_attributes_of_optimizers_exist_or_say_what_to_use():
    comm = torchmn.create_communicator("solo")
    actual = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = torchmn.create_multi_node_optimizer(actual, comm)
    for entry in OF_OPTIMIZERS:
        name = entry.name.removeprefix("MultiNodeOptimizer.")
        assert hasattr(optimizer, name) == bool(entry.here)
        assert entry.here or entry.note in raised(optimizer, name)


def test_attributes_of_checkpointers_exist_or_say_what_to_use(tmp_path):
    comm = torchmn.create_communicator("solo")
    checkpointer = torchmn.create_multi_node_checkpointer("run", comm, tmp_path)
    for entry in OF_CHECKPOINTERS:
        name = entry.name.removeprefix("MultiNodeCheckpointer.")
        if entry.here:
            assert callable(getattr(checkpointer, name))
        else:
            assert entry.note in raised(checkpointer, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nobodys'$"):
        checkpointer.nobodys  # noqa: B018


def test_the_page_shows_the_table():
    assert len(BY_NAME) == len(NAMES)
    assert markdown("ChainerMN", NAMES) in page("from-chainermn.md")


@pytest.mark.parametrize(
    "name", ["links", "extensions", "optimizers", "global_except_hook", "communicators", "testing"]
)
def test_modules_can_be_imported_by_their_names(name):
    code = f"import torchmn as chainermn; chainermn.{name}; import torchmn.{name}; from torchmn import {name}"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_without_the_package_the_errors_are_python_s():
    script = (
        without_package("torchmn.chainermn")
        + """
import numpy, torchmn
comm = torchmn.create_communicator("solo")
for wrong in (
    lambda: comm.allreduce_grad,
    lambda: torchmn.CommunicatorBase,
    lambda: comm.allreduce(numpy.ones(1)),
    lambda: comm.bcast_obj(1, max_buf_len=2),
    lambda: torchmn.create_communicator("solo", batched_copy=True),
):
    try:
        wrong()
    except (AttributeError, ValueError, TypeError) as error:
        print(type(error).__name__, error)
"""
    )
    job = run_job(script, 1, "solo")
    assert job.returncode == 0, job.output
    for text in (
        "AttributeError 'Communicator' object has no attribute 'allreduce_grad'\n",
        "AttributeError torchmn has no 'CommunicatorBase'. Did you mean 'Communicator'?",
        "ArgumentError rank 0 of 1: allreduce: expected a tensor, got",
        "got an unexpected keyword argument 'max_buf_len'",
        "UnknownKeyword create_communicator: unknown keyword 'batched_copy'",
    ):
        assert text in job.stdout, job.output
