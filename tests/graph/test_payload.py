"""Payloads are restored from tensors and heading."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchmn.errors import GraphError
from torchmn.graph.payload import TENSOR, Heading, flatten, restore

Point = namedtuple("Point", "x y")

constants = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
tensors = st.builds(torch.tensor, st.lists(st.integers(0, 9), max_size=3))
payloads = st.recursive(
    constants | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers() | st.booleans(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


@given(payloads)
def test_a_payload_is_restored_from_its_tensors_and_its_heading(payload):
    found, structure = flatten(payload)
    assert all(isinstance(x, torch.Tensor) for x in found)
    heading = Heading.decode(Heading(structure, 3).encode())
    assert heading.rows == 3
    restored = restore(heading.structure, iter(found))
    assert repr(restored) == repr(payload)  # types and NaN included
    assert type(restored) is type(payload)


def test_one_tensor_is_the_simplest_structure():
    x = torch.ones(2)
    assert flatten(x) == ([x], TENSOR)


def test_a_packed_sequence_is_a_payload():
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    found, structure = flatten(packed)
    restored = restore(structure, iter(found))
    assert isinstance(restored, PackedSequence) and torch.equal(restored.data, packed.data)


def test_results_of_torch_functions_arrive_as_tuples():
    values, indices = torch.tensor([3.0, 5.0]).max(dim=0)
    found, structure = flatten(torch.tensor([3.0, 5.0]).max(dim=0))
    assert restore(structure, iter(found)) == (values, indices)


@pytest.mark.parametrize("thing", [object(), {1, 2}, torch.nn.Linear(1, 1), lambda: 0])
def test_other_objects_are_named_with_their_place(thing):
    with pytest.raises(GraphError, match=r"it\['a'\]\[1\]: expected tensors in any nesting"):
        flatten({"a": (torch.ones(1), thing)}, "it")
    found, structure = flatten({"a": (torch.ones(1), thing)}, keep_objects=True)
    assert restore(structure, iter(found))["a"][1] is thing
