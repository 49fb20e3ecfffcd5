"""The random generators that a training script uses without naming them: torch's, NumPy's and Python's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

PREFIX = "random."


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every global generator, by entry name; CUDA's where this rank computes on a GPU."""
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
    """The entries of the generators that this rank has."""
    return [f"{PREFIX}{kind}" for kind in ("torch", "numpy", "python", *(["cuda"] if device.type == "cuda" else []))]


def restore(name: str, state: Any, device: torch.device) -> None:
    """Set the generator of an entry to a state that `capture` gave."""
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
    """Start the generator of an entry anew, from a seed of 63 bits."""
    if name == f"{PREFIX}torch":
        torch.random.default_generator.manual_seed(seed)
    elif name == f"{PREFIX}numpy":
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif name == f"{PREFIX}python":
        random.seed(seed)
    else:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
