"""fine_tune: the classifier first, then the whole network, with the momentum of the schedule."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.models.small import small_digits, small_images, small_model
from torchmn.errors import ArgumentError
from torchmn.models import LabelledBatches, Momentum, fine_tune
from torchmn.models.sparse_autoencoder.fine_tuning import classification_cost

LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_the_cost_is_the_cross_entropy_of_each_logistic_output():
    logits, labels = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 2])
    expected = 0.0
    for image, label in enumerate(labels):
        for number in range(4):
            p = torch.sigmoid(logits[image, number])
            expected -= torch.log(p if number == label else 1 - p)
    assert_close(classification_cost(logits, labels), expected / 3)


def test_the_classifier_learns_alone_then_all_with_its_momentum():
    """The whole schedule against the update formulas: v ← μ·v + gradient, weight ← weight - rate·v."""
    model, other = small_model(), small_model()
    batches = LabelledBatches(small_images(6), LABELS, 4)
    seen, momentum = [], Momentum(0.8, 0.2, 2)
    history = fine_tune(
        model, batches, epochs=3, initial_epochs=1, learning_rate=0.02, momentum=momentum, progress=seen.append
    )
    velocity, costs = torch.zeros_like(other.classifier.weight), []
    for epoch in range(3):
        for x, labels in batches:
            filters = [stack.filter.weight for stack in other.stacks]
            cost = classification_cost(other(x), labels)
            gradient, *slopes = torch.autograd.grad(cost, [other.classifier.weight, *filters])
            velocity = [0.8, 0.5, 0.2][epoch] * velocity + gradient
            costs.append(cost.item())
            with torch.no_grad():
                other.classifier.weight -= 0.02 * velocity
                if epoch >= 1:
                    for weight, slope in zip(filters, slopes, strict=True):
                        weight -= 0.02 * slope
                        weight /= weight.flatten(3).norm(dim=3)[..., None, None, None]
    assert [step.cost for step in seen] == pytest.approx(costs, rel=1e-12)
    assert [step.classifier_only for step in seen] == [True] * 2 + [False] * 4
    assert history[0] == pytest.approx((4 * costs[0] + 2 * costs[1]) / 6)
    for name, parameter in model.named_parameters():
        assert_close(parameter, other.get_parameter(name))


def test_in_the_initial_epochs_filters_do_not_move():
    model = small_model()
    before = [stack.filter.weight.detach().clone() for stack in model.stacks]
    fine_tune(model, LabelledBatches(small_images(6), LABELS, 3), epochs=2, initial_epochs=2)
    for stack, weight in zip(model.stacks, before, strict=True):
        assert torch.equal(stack.filter.weight, weight)


def test_it_learns_digits():
    model = small_model(in_size=(12, 11), classes=10)
    digits = small_digits(300, 20)
    history = fine_tune(model, digits, epochs=6, learning_rate=0.1)
    assert history[-1] < 0.5 * history[0]
    with torch.no_grad():
        correct = (model(digits.images).argmax(1) == digits.labels).double().mean()
    assert correct > 0.9


def test_more_initial_epochs_than_epochs_are_refused():
    with pytest.raises(ArgumentError, match="at most as many initial_epochs as epochs, 1, got 2"):
        fine_tune(small_model(), [], epochs=1, initial_epochs=2)
