"""The table of neon's names in Python: what exists can be used, and the error for the rest contains what to use."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from types import ModuleType

import pytest
import torch

import torchmn
from tests.docs.pages import page
from tests.experiment.neon_experiments import LAYERS, MODELS
from tests.foreign.tables import markdown
from torchmn import models, nn
from torchmn.neon import NAMES
from torchmn.other_spellings import OtherName

ROOTS = {"torch": torch, "torchmn": torchmn}


@pytest.mark.parametrize("module", [torchmn, nn, models], ids=lambda module: module.__name__)
@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_a_name_exists_or_its_error_contains_what_to_use(entry: OtherName, module: ModuleType):
    if entry.name in module.__all__:
        assert getattr(module, entry.name) is attrgetter(entry.here)(torchmn)
        return
    with pytest.raises(AttributeError) as caught:
        getattr(module, entry.name)
    assert (f"torchmn.{entry.here}" if entry.here else entry.note) in str(caught.value)
    assert str(caught.value).count(entry.name) >= 1


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_what_to_use_exists(entry: OtherName):
    import_module("torch.utils.data")
    used = [f"torchmn.{entry.here}"] if entry.here else re.findall(r"torch(?:mn)?(?:\.\w+)+", entry.note)
    assert used or "torchmn train" in entry.note
    for path in used:
        root, _, rest = path.partition(".")
        assert attrgetter(rest)(ROOTS[root]) is not None


def test_every_class_of_layers_and_models_is_in_the_table():
    names = [entry.name for entry in NAMES]
    assert len(names) == len(set(names))
    assert {*LAYERS, *MODELS} <= set(names)


def test_an_unknown_name_is_the_error_of_python():
    for module in (nn, models):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'ConvLayerDst'$"):
            module.ConvLayerDst  # noqa: B018


def test_the_page_shows_the_table():
    assert markdown("neon", NAMES) in page("from-neon.md")
