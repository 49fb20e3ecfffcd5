"""Saves, restores and reseeds the global random generators of torch, NumPy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

PREFIX = "random."


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the state of every global generator, by entry name; with CUDA's if `device` is a GPU."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        f"{PREFIX}torch": torch.get_rng_state(),
        f"{PREFIX}numpy": np.random.get_state(legacy=False),
        f"{PREFIX}python": (version, np.array(words, dtype=np.uint32), gauss),
    }
    if device.type == "cuda":
        states[f"{PREFIX}cuda"] = torch.cuda.get_rng_state(device)
    return states


def names(device: torch.device) -> list[str]:
    """Returns the entry names of the generators of this rank."""
    return [f"{PREFIX}{kind}" for kind in ("torch", "numpy", "python", *(["cuda"] if device.type == "cuda" else []))]


def restore(name: str, state: Any, device: torch.device) -> None:
    """Sets the generator of an entry to a state from `capture`."""
    if name == f"{PREFIX}torch":
        torch.set_rng_state(state)
    elif name == f"{PREFIX}numpy":
        np.random.set_state(state)
    elif name == f"{PREFIX}python":
        version, words, gauss = state
        random.setstate((version, tuple(words.tolist()), gauss))
    else:
        torch.cuda.set_rng_state(state, device)


def reseed(name: str, seed: int, device: torch.device) -> None:
    """Seeds the generator of an entry, with a seed of 63 bits."""
    if name == f"{PREFIX}torch":
        torch.random.default_generator.manual_seed(seed)
    elif name == f"{PREFIX}numpy":
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif name == f"{PREFIX}python":
        random.seed(seed)
    else:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
