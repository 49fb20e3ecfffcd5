"""Pretraining against the formulas of the cost and of its gradients, written with dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.small import small_digits, small_images, small_model
from tests.nn.naive import places
from torchmn.errors import ArgumentError
from torchmn.models import LabelledBatches, PretrainingCost, pretrain
from torchmn.models.sparse_autoencoder.pretraining import pretraining_step


def dense(weight: Tensor, in_size: tuple[int, int]) -> Tensor:
    """The matrix of a stride-1 local filter: (out maps, rows, columns) x (in maps, height, width), both flat."""
    rows, columns, maps, in_maps, height, width = weight.shape
    matrix = weight.new_zeros(maps, rows, columns, in_maps, *in_size)
    for k, r, q in places(maps, rows, columns):
        matrix[k, r, q, :, r : r + height, q : q + width] = weight[r, q, k]
    return matrix.view(maps * rows * columns, -1)


def pooled(y: Tensor, kernel: int) -> tuple[Tensor, Tensor]:
    """The sum of all pooled values, and its gradient: y divided by the norm of every window that contains it."""
    total, gradient = torch.zeros((), dtype=y.dtype), torch.zeros_like(y)
    for b, c, r, q in places(*y.shape[:2], y.shape[2] - kernel + 1, y.shape[3] - kernel + 1):
        window = b, c, slice(r, r + kernel), slice(q, q + kernel)
        norm = y[window].norm()
        total += norm
        gradient[window] += y[window] / norm
    return total, gradient


def unit(matrix: Tensor) -> Tensor:
    return matrix / matrix.norm(dim=1, keepdim=True)


def reference_step(encoder: Tensor, decoder: Tensor | None, x: Tensor, y_shape, pool, sparsity, rate):
    """Costs per image and the new (encoder, decoder) as dense matrices; decoder None: tied."""
    batch, inside = len(x), encoder != 0
    tied = decoder is None
    decoder = encoder if decoder is None else decoder
    x = x.flatten(1)
    y = x @ encoder.t()
    difference = y @ decoder - x
    total, slope = pooled(y.view(batch, *y_shape), pool)
    cost = 0.5 * (difference**2).sum() / batch, sparsity * total / batch
    error = difference / batch
    decoder_gradient = (y.t() @ error) * inside
    y_gradient = error @ decoder.t() + sparsity / batch * slope.view(batch, -1)
    encoder_gradient = (y_gradient.t() @ x) * inside
    decoder = unit(decoder - rate * decoder_gradient)
    return cost, unit((decoder if tied else encoder) - rate * encoder_gradient), decoder


@pytest.mark.parametrize("tied", [True, False])
def test_three_steps_of_a_stack_are_those_of_the_formulas(tied):
    stack = small_model(tied=tied).stacks[0]
    filters = stack.filter
    encoder, decoder = dense(filters.weight.detach(), (10, 9)), None
    if not tied:
        torch.nn.init.normal_(filters.decoder_weight)
        filters.unit_norm_()
        decoder = dense(filters.decoder_weight.detach(), (10, 9))
    for x in small_images(9).split(3):
        y_shape = filters.out_maps, *filters.out_size
        expected, encoder, new_decoder = reference_step(encoder, decoder, x, y_shape, 2, 0.3, 0.05)
        costs = pretraining_step(stack, x, sparsity=0.3, learning_rate=0.05)
        assert_close(costs, torch.stack([3 * expected[0], 3 * expected[1], torch.tensor(3.0).double()]))
        assert_close(dense(filters.weight.detach(), (10, 9)), encoder)
        if not tied:
            decoder = new_decoder
            assert_close(dense(filters.decoder_weight.detach(), (10, 9)), decoder)


def test_stacks_learn_one_after_the_other_each_from_the_frozen_stacks_below():
    model, alone = small_model(), small_model()
    images = small_images(6)
    seen = []
    history = pretrain(model, [images[:4], images[4:]], epochs=2, learning_rate=0.05, progress=seen.append)
    assert [(at.stack, at.epoch, at.batch) for at in seen] == list(places(2, 2, 2))
    costs = []
    for number, stack in enumerate(alone.stacks):
        for batch in (images[:4], images[4:]) * 2:
            x = alone.features(batch, number).detach()
            *parts, count = pretraining_step(stack, x, sparsity=0.1, learning_rate=0.05).tolist()
            costs.append(PretrainingCost(parts[0] / count, parts[1] / count))
    assert costs == [at.cost for at in seen]
    assert torch.equal(model.features(images), alone.features(images))
    # An epoch's cost is that of its 6 images: 4 in the first batch, 2 in the second.
    expected = (4 * costs[2].total + 2 * costs[3].total) / 6
    assert history[0][1].total == pytest.approx(expected)
    assert (len(history), len(history[0])) == (2, 2)


def test_only_filters_learn_and_they_keep_norm_1():
    model = small_model()
    classifier = model.classifier.weight.detach().clone()
    pretrain(model, [small_images()], epochs=3)
    assert torch.equal(model.classifier.weight, classifier)
    for stack in model.stacks:
        norms = stack.filter.weight.detach().flatten(3).norm(dim=3)
        assert_close(norms, torch.ones_like(norms))
        assert stack.filter.weight.grad is None


def test_single_stacks_can_be_chosen():
    model, all_of_them = small_model(), small_model()
    before = model.stacks[0].filter.weight.detach().clone()
    seen = []
    history = pretrain(model, [small_images()], epochs=1, stacks=[1], progress=seen.append)
    assert [step.stack for step in seen] == [1] and len(history) == 1
    assert torch.equal(model.stacks[0].filter.weight, before)
    # The second stack of random filters below learns something else than that of pretrained ones.
    assert history[0] != pretrain(all_of_them, [small_images()], epochs=1)[1]
    with pytest.raises(ArgumentError, match="expected stacks from 0 to 1, got 2"):
        pretrain(model, [small_images()], stacks=[2])


def test_on_digits_the_cost_falls_in_every_stack():
    model = small_model(in_size=(12, 11), classes=10)
    history = pretrain(model, small_digits(200, 20), epochs=3)
    assert len(history) == 2
    for first, *_, last in history:
        assert last.total < 0.9 * first.total
        assert last.reconstruction < first.reconstruction


def test_progress_has_values_for_a_log():
    seen = []
    pretrain(small_model(), LabelledBatches(small_images(), torch.zeros(4), 4), epochs=1, progress=seen.append)
    values = seen[1].values()
    assert values["stack"] == 1 and values["cost"] == values["reconstruction"] + values["sparsity"]


def test_an_iterator_is_refused_because_it_ends_after_one_epoch():
    with pytest.raises(ArgumentError, match=r"once per epoch.*got the iterator list_iterator"):
        pretrain(small_model(), iter([small_images()]))


@pytest.mark.parametrize("shape", [(4, 1, 12, 9), (4, 10, 9), (4, 3, 10, 9)])
def test_images_of_another_size_than_the_filters_have_are_refused_in_words(shape):
    with pytest.raises(ArgumentError, match=r"expected images \(batch, 1, 10, 9\), got .*in_size=\(height, width\)"):
        pretrain(small_model(), [torch.zeros(shape, dtype=torch.float64)], epochs=1)
