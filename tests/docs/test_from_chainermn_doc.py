"""docs/from-chainermn.md keeps its word: every snippet runs as printed, and ChainerMN's names are answered."""

import pytest
import torch

import torchmn
from tests.docs.pages import (
    assert_contents_are_the_sections,
    assert_every_section_has_a_snippet,
    assert_public_names_and_links_exist,
    page,
    run_snippets,
)

PAGE = page("from-chainermn.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (3, "mpi")])
def test_every_snippet_runs_as_printed(n: int, transport: str, tmp_path) -> None:
    after = """
globals().update(program)
last = comm.size - 1
assert total.item() == comm.size * (comm.size + 1) / 2 and names[last] == f"rank {last}"
assert (weight.grad == max(comm.rank, 1)).all()
assert "Linear" in graph and f"rank {last}" in graph
assert result["accuracy"] > 0.5
"""
    run_snippets(PAGE, n, transport, tmp_path, after)


def test_the_page_names_what_exists() -> None:
    assert_contents_are_the_sections(PAGE)
    assert_every_section_has_a_snippet(PAGE)
    assert_public_names_and_links_exist(PAGE)


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("nccl", r"create_communicator\(\"nccl\"\)"),
        ("create_multi_node_n_step_rnn", r"It is torchmn\.nn\.create_multi_node_n_step_rnn"),
        ("create_multi_node_iterator", r"It is torchmn\.iterators\.create_multi_node_iterator"),
    ],
)
def test_a_name_of_the_package_says_what_it_is_today(name: str, today: str) -> None:
    with pytest.raises(AttributeError, match=today):
        getattr(torchmn, name)


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("setup", r"torch\.optim\.SGD\(model\.parameters\(\)"),
        ("update", r"backward\(\), then step\(\)"),
        ("target", "keep a reference to the model"),
        ("add_hook", r"weight_decay=.*clip_grad_norm_"),
    ],
)
def test_a_name_of_an_optimizer_says_what_it_is_today(name: str, today: str) -> None:
    comm = torchmn.create_communicator("solo")
    actual = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = torchmn.create_multi_node_optimizer(actual, comm)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=today):
        getattr(optimizer, name)
