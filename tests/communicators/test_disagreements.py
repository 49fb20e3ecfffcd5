"""Errors about long arguments that differ between ranks show the difference, and not the whole arguments."""

import pytest
import torch

import torchmn
from tests._worlds import ranks


def refusal(comm, *values: object) -> str:
    with pytest.raises(torchmn.MismatchError) as caught:
        comm.agree("step", **{f"value {n}": value for n, value in enumerate(values)})
    return str(caught.value)


@ranks(2, on="threads")
def test_of_many_items_those_that_differ_are_shown(comm):
    mine = tuple((f"layer{n}.weight", torch.float32 if n != 70 or comm.rank else torch.float64) for n in range(100))
    text = refusal(comm, mine, "the same on both ranks")
    assert text.count("layer70.weight") == 2
    assert "torch.float64" in text and "layer69.weight" not in text
    assert "the same on both ranks" in text


@ranks(2, on="threads")
def test_items_in_another_order_or_number_are_reported_as_such(comm):
    names = [f"layer{n}.weight" for n in range(100)]
    swapped = [*names[:50], names[51], names[50], *names[52:]]
    assert "differ from index 50 on" in refusal(comm, tuple(names if comm.rank else swapped))
    text = refusal(comm, tuple(names if comm.rank else [*names, names[0]]))
    assert "100 items, which differ from index 100 on" in text and "101 items" in text


@ranks(2, on="threads")
def test_a_long_value_that_is_the_same_is_not_shown(comm):
    text = refusal(comm, tuple(f"layer{n}.weight" for n in range(100)), comm.rank)
    assert "value 0 the same on all ranks, value 1 0" in text and "layer" not in text


@ranks(2, on="threads")
def test_of_a_long_text_the_first_difference_is_shown(comm):
    text = refusal(comm, "momentum 0.9, " * 50 + f"lr {comm.rank + 5}.25" + ", decay 0" * 50)
    assert "lr 5.25" in text and "lr 6.25" in text


@ranks(2, on="threads")
def test_short_values_are_shown_whole(comm):
    assert "value 0 (1, 2)" in refusal(comm, (1, 2) if comm.rank else (1, 3))


@ranks(2, on="threads")
def test_names_are_compared_too(comm):
    with pytest.raises(torchmn.MismatchError, match=r"lr 0\.5"):
        comm.agree("step", **({"lr": 0.5} if comm.rank else {"momentum": 0.5}))
    with pytest.raises(torchmn.MismatchError, match="a 1, b 2"):
        comm.agree("step", **({"a": 1, "b": 2} if comm.rank else {"b": 1, "a": 2}))
    comm.agree("step", **({"a": 1, "b": 2} if comm.rank else {"b": 2, "a": 1}))


@ranks(2, on="threads")
def test_lists_and_dicts_are_compared_and_tensors_are_refused(comm):
    comm.agree("step", sizes=[1, 2], options={"lr": [0.1]})
    assert comm.agree("step", differ=[comm.rank]) == [[0], [1]]
    assert "value 0 [1, 0]" in refusal(comm, [1, comm.rank])
    weights = torch.zeros(5000)
    weights[2500] = comm.rank
    with pytest.raises(
        torchmn.ArgumentError, match=r"step: expected w to be a plain value, got a torch\.float32 tensor"
    ):
        comm.agree("step", w=weights)


@ranks(2, on="threads")
def test_a_number_and_its_text_are_distinguished(comm):
    text = refusal(comm, "1" if comm.rank else 1)
    assert "value 0 '1'" in text and "value 0 1)" in text
