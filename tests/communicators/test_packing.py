"""Objects as one flat tensor, and back."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests._worlds.data import EVERY_DTYPE, SHAPES, assert_same, bits, odd_layouts
from torchmn.communicators.objects import pack, unpack

HERE = torch.device("cpu")
Point = namedtuple("Point", "x y")


@dataclass
class Sample:
    """A user's own class."""

    image: torch.Tensor
    name: str


def there_and_back(obj):
    flat, apart = pack(obj)
    assert flat.dtype == torch.uint8 and flat.dim() == 1 and apart == []
    return unpack(flat, HERE)


def test_every_dtype_and_shape_keeps_its_bits():
    tensors = [bits(shape, dtype, number) for number, dtype in enumerate(EVERY_DTYPE) for shape in SHAPES]
    for got, expected in zip(there_and_back(tensors), tensors, strict=True):
        assert_same(got, expected)


def test_every_layout_keeps_its_values():
    layouts = {name: x for name, x in odd_layouts(1).items() if not x.requires_grad}
    assert len(layouts) >= 5
    for name, got in there_and_back(layouts).items():
        assert_same(got, layouts[name], name)


def test_any_structure_keeps_its_types():
    big = 2**53 + 1
    batch = {
        "pair": Point(torch.tensor([big]), [torch.tensor(1.5), "text", None]),
        3: (big, -0.0, True, b"bytes", ()),
        "own": Sample(torch.arange(3), "three"),
        "ordered": OrderedDict(b=torch.zeros(2, 0), a=np.arange(4)),
    }
    got = there_and_back(batch)
    assert list(got) == list(batch)
    assert isinstance(got["pair"], Point) and got["pair"].x.tolist() == [big]
    assert got["pair"].y[1:] == ["text", None] and got["pair"].y[0].shape == ()
    assert got[3] == batch[3] and isinstance(got[3], tuple)
    assert isinstance(got["own"], Sample) and got["own"].name == "three" and got["own"].image.tolist() == [0, 1, 2]
    assert list(got["ordered"]) == ["b", "a"] and got["ordered"]["b"].shape == (2, 0)
    np.testing.assert_array_equal(got["ordered"]["a"], np.arange(4))


def test_what_only_torch_can_pickle_arrives_too():
    leaf = torch.ones(2, requires_grad=True)
    parameter = torch.nn.Parameter(torch.arange(3.0))
    sparse = torch.eye(3).to_sparse()
    got = there_and_back((leaf, parameter, sparse))
    assert got[0].requires_grad and got[0].tolist() == [1, 1]
    assert isinstance(got[1], torch.nn.Parameter) and got[1].tolist() == [0, 1, 2]
    assert got[2].is_sparse and torch.equal(got[2].to_dense(), torch.eye(3))


def test_a_slice_does_not_take_the_whole_tensor_along():
    whole = torch.zeros(1000, 1000)
    assert len(pack([whole[3], whole[4]])[0]) < 10_000


def test_a_tensor_that_occurs_twice_is_sent_once_and_stays_one():
    x = torch.zeros(5000)
    flat, _ = pack([x, {"again": x}])
    got = unpack(flat, HERE)
    assert len(flat) < 1.5 * x.nbytes
    assert got[0] is got[1]["again"]


def test_tensors_own_their_memory():
    small, _ = there_and_back((torch.arange(3), torch.zeros(10_000)))
    assert small.untyped_storage().nbytes() == small.nbytes


def test_large_tensors_are_left_out_in_order():
    tensors = [torch.full((size,), float(size)) for size in (10, 300, 20, 500)]
    flat, apart = pack(tensors, largest=1000)
    assert [len(x) for x in apart] == [300, 500]
    waiting = iter(apart)

    def fetch(spec):
        x = next(waiting)
        assert (spec.dtype, spec.shape) == (x.dtype, tuple(x.shape))
        return x

    for got, expected in zip(unpack(flat, HERE, fetch), tensors, strict=True):
        assert_same(got, expected)


def test_what_does_not_pickle_raises():
    with pytest.raises(Exception, match="pickle"):
        pack([torch.zeros(2), lambda: None])
