"""States are equal after conversion to JSON and tensors and back; errors name the path of other values."""

import json
import math
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from tests._worlds.data import EVERY_DTYPE, SHAPES, assert_same, bits, odd_layouts
from torchmn.training.checkpoint import tensor_files
from torchmn.training.checkpoint.state_copy import StateCopy
from torchmn.training.checkpoint.state_tree import Flattener, Unstorable, specs, unflatten
from torchmn.training.checkpoint.tensor_files import Wanted


def there_and_back(state, tmp_path):
    """Returns the state after writing and reading it."""
    flattener, copy = Flattener(), StateCopy()
    tree = flattener.flatten(state, "x")
    copy.take(flattener.tensors)
    (tmp_path / "t").unlink(missing_ok=True)
    header = tensor_files.write(tmp_path / "t", copy, {*flattener.tensors}).header
    tree = json.loads(json.dumps(tree, allow_nan=False))
    texts = {path: tensor_files.description(place, copy.bytes_of(place)) for path, place in copy.places.items()}
    wanted = {spec["!tensor"]: Wanted(spec, texts[spec["!tensor"]], mapped=False) for spec in specs(tree)}
    return unflatten(tree, tensor_files.read(tmp_path / "t", header, wanted))


def without_tensors(state):
    flattener = Flattener()
    return unflatten(json.loads(json.dumps(flattener.flatten(state, "x"), allow_nan=False)), {})


keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
states = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(states)
def test_plain_values_come_back_with_their_types_and_order(state):
    assert repr(without_tensors(state)) == repr(state)


def test_special_values_come_back():
    state = {
        "numbers": [10**400, -(2**63) - 1, 0.1 + 0.2, -0.0, math.inf, -math.inf, math.nan, 5e-324, True, 1, 1.0],
        "!odd key": {"!tensor": 1},
        1: {"1": "one"},
        "ordered": OrderedDict([(2, "b"), (1, "a")]),
        "counter": Counter({10: 2, 30: 1}),
        "size": torch.Size([2, 3]),
        "text": "\ud800 \0 é",
    }
    assert repr(without_tensors(state)) == repr(state)


def test_tensors_of_every_dtype_shape_and_layout_come_back_bit_by_bit(tmp_path):
    state = {str(dtype): [bits(shape, dtype, 3) for shape in SHAPES] for dtype in EVERY_DTYPE}
    result = there_and_back(state, tmp_path)
    for dtype, tensors in state.items():
        for got, expected in zip(result[dtype], tensors, strict=True):
            assert_same(got, expected, dtype)
    layouts = odd_layouts(5)
    result = there_and_back(layouts, tmp_path)
    for name, x in layouts.items():
        assert_same(result[name], x, name)
    for name in ("channels last", "transposed"):
        assert result[name].stride() == layouts[name].stride(), f"{name}: kernels may round differently"


def test_tensors_that_share_memory_are_stored_once_and_share_it_again(tmp_path):
    x = torch.arange(6.0)
    flattener = Flattener()
    flattener.flatten({"a": x, "tied": x.view(6), "part": x[2:]}, "m")
    assert list(flattener.tensors) == ["m/a", "m/part"]
    result = there_and_back({"a": x, "tied": x.view(6), "part": x[2:]}, tmp_path)
    assert result["a"].data_ptr() == result["tied"].data_ptr()
    assert result["part"].tolist() == [2, 3, 4, 5]


def test_memory_of_stored_tensors_is_not_reused_while_flattening():
    flattener = Flattener()
    values = np.arange(6.0).reshape(2, 3).T
    memory = weakref.ref(values)
    flattener.flatten(torch.from_numpy(values), "x")
    del values
    assert memory() is not None


def test_keys_that_look_alike_keep_their_tensors_apart(tmp_path):
    state = {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.full((1,), 2.0), "a": {"b": torch.full((1,), 3.0)}}
    result = there_and_back(state, tmp_path)
    assert [result[0], result["0"], result["a/b"], result["a"]["b"]] == [0, 1, 2, 3]


def test_numpy_arrays_and_scalars_come_back(tmp_path):
    state = [np.arange(6, dtype=np.uint32).reshape(2, 3), np.float64(0.1), np.int64(7), np.array(2.5), np.bool_(True)]
    for got, expected in zip(there_and_back(state, tmp_path), state, strict=True):
        assert type(got) is type(expected) and got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_values_that_cannot_be_stored_are_named_by_their_path():
    own = []
    own.append(own)
    pair = namedtuple("pair", "a b")
    refused = {
        "an object": object(),
        "a set": {1, 2},
        "a function": len,
        "a subclass": defaultdict(int),
        "a namedtuple": pair(1, 2),
        "itself": own,
        "an object array": np.array([None]),
        "a masked array": np.ma.array([1, 2], mask=[False, True]),
        "a sparse tensor": torch.eye(3).to_sparse(),
        "no values": torch.empty(2, device="meta"),
        "a lazy tensor": nn.LazyLinear(3).weight,
        "a key": {object(): 1},
    }
    for name, x in refused.items():
        with pytest.raises(Unstorable, match=f"^optimizer/state/3/{name}"):
            Flattener().flatten({"state": {3: {name: x}}}, "optimizer")


def test_the_state_of_every_scheduler_comes_back(tmp_path):
    def schedulers(optimizer):
        return [
            lr_scheduler.StepLR(optimizer, 2),
            lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
            lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
            lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=2),
            lr_scheduler.PolynomialLR(optimizer, 10),
            lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
            lr_scheduler.SequentialLR(
                optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
            ),
        ]

    count = len(schedulers(torch.optim.SGD([torch.ones(1)], 0.1)))
    for place in range(count):
        optimizers = [torch.optim.SGD([torch.ones(1)], 0.1, momentum=0.9) for _ in range(2)]
        one, other = (schedulers(optimizer)[place] for optimizer in optimizers)
        for step in range(4):
            optimizers[0].step()
            one.step(*([float(step)] if place == 7 else []))
        optimizers[1].load_state_dict(there_and_back(optimizers[0].state_dict(), tmp_path))
        other.load_state_dict(there_and_back(one.state_dict(), tmp_path))
        for optimizer, scheduler in zip(optimizers, (one, other), strict=True):
            optimizer.step()
            scheduler.step(*([9.0] if place == 7 else []))
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"], type(one).__name__


def test_the_state_of_many_optimizers_comes_back(tmp_path):
    makers = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
    for make in (*makers, torch.optim.LBFGS, torch.optim.Adadelta, torch.optim.Rprop):
        weights = [torch.arange(6.0).view(2, 3) for _ in range(2)]
        one, other = (make([nn.Parameter(x)], lr=0.1) for x in weights)

        def step(optimizer):
            def loss():
                optimizer.zero_grad()
                value = optimizer.param_groups[0]["params"][0].sub(1).pow(2).sum()
                value.backward()
                return value

            optimizer.step(loss)

        step(one)
        weights[1].copy_(weights[0])
        other.load_state_dict(there_and_back(one.state_dict(), tmp_path))
        step(one)
        step(other)
        assert_same(weights[1], weights[0], make.__name__)
