"""Caches and mailboxes stay bounded in a long training, whatever changes from step to step."""

from __future__ import annotations

import tracemalloc
from typing import Any

import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from torchmn import Communicator
from torchmn.bounded_cache import BoundedCache, cached_tensors
from torchmn.communicators import arguments

SHAPES = tuple(((64 + n, 32, 3, 3), torch.float32) for n in range(161))
STEPS = 4_000


def compare_steps(first: int, count: int) -> None:
    """Fingerprints of the steps of a model of 161 parameters, whose learning rate is another one at each."""
    for step in range(first, first + count):
        shapes = tuple([((*shape,), dtype) for shape, dtype in SHAPES])  # as each step creates them
        arguments.fingerprint(("optimizer step", (False, ((("lr", 0.1 / (step + 1)),),), shapes), (1,) * 161))


def test_a_learning_rate_that_changes_at_every_step_keeps_the_same_memory_after_n_and_2n_steps() -> None:
    arguments._fingerprints.put("all that other tests have left is forgotten", 0, arguments._fingerprints.limit)
    compare_steps(0, STEPS)
    digests = len(arguments._digests)
    tracemalloc.start()
    try:
        compare_steps(STEPS, STEPS)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(arguments._digests) == digests  # the shapes are kept once
    assert arguments._fingerprints.total <= arguments._fingerprints.limit
    assert kept < 8 * arguments._fingerprints.limit  # 2 MB; all shapes for each step would be 70


@ranks(2, on="threads")
def test_an_optimizer_whose_learning_rate_changes_keeps_the_shapes_of_its_parameters_once(comm: Communicator) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(n + 1)) for n in range(40))
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    kept = []
    for step in range(20):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
        if step in (9, 19):
            comm.barrier()
            kept.append(len(arguments._digests))
            comm.barrier()
    assert kept[0] == kept[1]


def test_equal_and_only_equal_keys_have_equal_fingerprints() -> None:
    other = (*SHAPES[:-1], ((1, 1), torch.float32))
    keys = [("step", (SHAPES,), None), ("step", (other,), None), ("step", (SHAPES[:-1],), None), ("step", (), SHAPES)]
    assert len({arguments.fingerprint(key) for key in keys}) == len(keys)
    before = [arguments.fingerprint(key) for key in keys]
    for cache in (arguments._fingerprints, arguments._digests):
        cache.put("forget", 0, cache.limit)
    assert [arguments.fingerprint(key) for key in keys] == before


def test_a_cache_forgets_all_before_it_holds_too_much_and_keeps_one_large_entry() -> None:
    cache: BoundedCache[int] = BoundedCache(100)
    for key in range(1_000):
        cache.put(key, key, 30)
        assert cache.get(key) == key
        assert cache.total == 30 * len(cache) <= 100
    cache.put("large", 1, 1_000)
    assert (len(cache), cache.get("large")) == (1, 1)


def test_tensors_are_cached_up_to_a_number_of_bytes() -> None:
    calls = []

    @cached_tensors(100_000)
    def zeros(length: int) -> torch.Tensor:
        calls.append(length)
        return torch.zeros(length)

    for length in [5, 5, *range(1_000, 2_000), 1_999]:
        assert zeros(length).shape == (length,)
        assert zeros.cache.total <= 100_000
    assert calls == [5, *range(1_000, 2_000)]


@ranks(2, on=("threads", "gloo"))
def test_tags_that_never_repeat_leave_nothing_behind(comm: Communicator) -> None:
    transport: Any = comm.transport
    boxes = transport._mailboxes if hasattr(transport, "_mailboxes") else transport._shared.mailboxes
    for tag in range(50):
        comm.send(torch.full((3,), float(tag)), 1 - comm.rank, tag)
    for tag in reversed(range(50)):
        assert comm.recv(1 - comm.rank, tag).unique().item() == tag
    comm.barrier()
    assert len(boxes) == 0


def test_a_cache_counts_its_misses_and_keeps_its_bound_after_many_keys_that_never_repeat():
    cache: BoundedCache[int] = BoundedCache(100)
    for step in range(1000):
        for key in ("kept", step):
            if cache.get(key) is None:
                cache.put(key, 1, 5)
    assert len(cache) <= 20 and cache.total <= cache.limit
    assert 1000 < cache.misses < 1100
