"""Names of checkpoints and of their directories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn import create_multi_node_checkpointer
from torchmn.training.checkpoint.manifest import SaveId, escaped, name_problem, partial_save_of, save_of

NAMES = [
    "plain",
    "with.dots.v1.5",
    "with spaces ",
    "Ünïcödé 日本語",
    "a/b\\c",
    "..",
    ".hidden",
    "%2F",
    "a.step-0000000001.save-000001",
    "*?[x]",
    "line\nbreak",
]


@settings(max_examples=50, deadline=None)
@given(
    st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12), st.integers(0, 10**12), st.integers(0, 10**7)
)
def test_a_directory_leads_back_to_its_name_only(name, other, step, number):
    if name_problem(name) or name_problem(other):
        return
    save = SaveId(number, step)
    assert save_of(save.directory(name), name) == save
    assert partial_save_of(save.partial_directory(name), name) == save
    assert save_of(save.partial_directory(name), name) is None
    if other != name:
        assert escaped(other) != escaped(name)
        assert save_of(save.directory(name), other) is None


def test_directories_with_other_names_are_not_checkpoints():
    for directory in ("run", "run.step-1.save-000001", "run.step-0000000001.save-000001.bak", "run.step-0000000001"):
        assert save_of(directory, "run") is None
        assert partial_save_of(directory, "run") is None
    assert save_of("run.step-00000000001.save-000001", "run") is None


@ranks(2, on="threads")
def test_one_directory_may_contain_checkpoints_of_several_names(comm, tmp_path):
    for value, name in enumerate(NAMES):
        create_multi_node_checkpointer(name, comm, tmp_path).save(value, extra=name)
    for value, name in enumerate(NAMES):
        checkpointer = create_multi_node_checkpointer(name, comm, tmp_path)
        assert checkpointer.maybe_load() == value
        assert checkpointer.extra == name
    assert len(list(tmp_path.iterdir())) == len(NAMES)


@ranks(2, on="threads")
@pytest.mark.parametrize("name", ["", None, 3, "x" * 151, "é" * 100, "\ud800"])
def test_invalid_names_are_refused_on_all_ranks(comm, tmp_path, name):
    mine = name if comm.rank == 1 else "fine"
    call = lambda: create_multi_node_checkpointer(mine, comm, tmp_path)  # noqa: E731
    assert_refused(comm, call, "create_multi_node_checkpointer", "name", "rank 1", kind=torchmn.ArgumentError)
    assert not list(tmp_path.iterdir())
