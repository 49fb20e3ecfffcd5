"""SparseAutoencoder: published sizes, and the numbers of its layers applied in turn."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.models.small import small_images, small_model
from tests.nn import naive
from torchmn.errors import ArgumentError
from torchmn.models import CIFAR10, MNIST, SparseAutoencoder


@pytest.mark.parametrize(
    ("configuration", "sizes", "features"),
    [(MNIST, [25, 23, 21, 19, 17, 15], 1800), (CIFAR10, [29, 27, 25, 23, 21, 19], 2888)],
)
def test_the_configurations_have_the_published_sizes(configuration, sizes, features):
    model = configuration.model()
    x, seen = torch.rand(1, configuration.in_maps, *configuration.in_size), []
    for stack in model.stacks:
        filtered = stack.filter(x)
        x = stack.pool(filtered)
        assert stack.norm(x).shape == x.shape
        seen += [filtered.shape[3], x.shape[3]]
    assert seen == sizes and x.shape[1:] == model.feature_shape == (8, sizes[-1], sizes[-1])
    assert model.classifier.weight.shape == (10, features)
    assert model(torch.rand(2, configuration.in_maps, *configuration.in_size)).shape == (2, 10)


def test_the_published_schedules():
    assert (MNIST.pretrain_learning_rate, MNIST.pretrain_epochs) == (0.01, 2)
    assert (CIFAR10.pretrain_learning_rate, CIFAR10.pretrain_epochs) == (0.001, 1)
    for each in (MNIST, CIFAR10):
        assert (each.sparsity, each.learning_rate, each.batch_size) == (0.1, 0.1, 100)
        assert (each.initial_epochs, each.epochs) == (1, 4)
        momentum = [each.momentum(epoch) for epoch in (0, 1, 5, 9)]
        assert momentum == pytest.approx([0.99, 0.972, 0.90, 0.90])


def test_logits_are_those_of_the_naive_layers():
    model, x = small_model(), small_images()
    expected = x
    for stack in model.stacks:
        expected = naive.local_filter(expected, stack.filter.weight.detach(), None, (1, 1), (0, 0))
        expected = naive.subtractive_divisive(naive.l2_pool(expected, (2, 2), (1, 1), 0.0, (0, 0)), (3, 3))
    assert_close(model.features(x), expected)
    assert_close(model(x), expected.flatten(1) @ model.classifier.weight.t())
    assert_close(model.features(x, 0), x)


def test_an_ordinary_optimizer_trains_it():
    model, x = small_model(), small_images(8)
    labels = torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    costs = []
    for _ in range(15):
        optimizer.zero_grad()
        cost = torch.nn.functional.cross_entropy(model(x), labels)
        cost.backward()
        optimizer.step()
        model.unit_norm_()
        costs.append(cost.item())
    assert costs[-1] < 0.5 * costs[0]
    for stack in model.stacks:
        norms = stack.filter.weight.detach().flatten(3).norm(dim=3)
        assert_close(norms, torch.ones_like(norms))


def test_sizes_that_can_not_be_are_named():
    with pytest.raises(ArgumentError, match="an image of 8 is too small for the pooling of stack 2 of 3"):
        SparseAutoencoder(3, in_size=8, kernel=3)
    with pytest.raises(ArgumentError, match="one number or a list of 2, one per stack"):
        SparseAutoencoder(2, kernel=(3, 3, 3))
