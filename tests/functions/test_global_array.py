"""GlobalArray: a custom layer equals the serial layer, forward and backward."""

import pytest
import torch
from torch.nn import functional as F

from tests._worlds import ranks
from tests.functions.images import image
from torchmn import GlobalArray, ProcessGrid
from torchmn.errors import HaloError
from torchmn.geometry import Window


@ranks(4)
@ranks(1, 2, 3, 6, 9, on="threads")
def test_a_convolution_through_the_views_is_the_serial_convolution(comm):
    whole, weight = image((2, 3, 10, 11)).requires_grad_(), image((4, 3, 5, 3), seed=1)
    serial = F.conv2d(whole, weight, padding=(2, 1), stride=(2, 1))
    upstream = image(tuple(serial.shape), seed=2)
    (expected,) = torch.autograd.grad(serial, whole, upstream)

    array = GlobalArray(comm, (10, 11), [Window(5, 2, (2, 2)), Window(3, padding=(1, 1))])
    assert array.output_shape == tuple(serial.shape[2:])
    mine = (..., *(interval.as_slice() for interval in array.owned_outputs))
    view = array.get_fprop_view(array.tile(whole.detach())).requires_grad_()
    y = F.conv2d(view, weight, stride=(2, 1))
    torch.testing.assert_close(y, serial[mine], rtol=1e-12, atol=1e-12)
    (of_view,) = torch.autograd.grad(y, view, upstream[mine])
    torch.testing.assert_close(array.get_bprop_view(of_view), array.tile(expected), rtol=1e-12, atol=1e-12)


@ranks(2, on="threads")
def test_one_dim_on_a_grid_of_height(comm):
    array = GlobalArray(ProcessGrid(comm, height=2), (9,), Window(3, padding=(1, 1)), padding_mode="circular")
    whole = image((9,))
    padded = F.pad(whole[None], (1, 1), mode="circular")[0]
    at = array.owned[0].start
    assert torch.equal(array.get_fprop_view(array.tile(whole)), padded[at : at + len(array.owned[0]) + 2])
    assert repr(array).startswith("<GlobalArray 9 on <ProcessGrid height 2>: this rank owns [")


@ranks(2, on="threads")
def test_windows_that_do_not_fit_raise(comm):
    with pytest.raises(HaloError, match=r"conv9 \(kernel 7, .*image of 6"):
        GlobalArray(comm, (6, 6), Window(7), name="conv9")
    with pytest.raises(HaloError, match=r"a window for each dim of \(6, 6\), got 1"):
        GlobalArray(comm, (6, 6), [Window(3)])
