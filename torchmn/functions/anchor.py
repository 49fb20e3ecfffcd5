"""A tensor that needs a gradient, for nodes of the graph that have no such input of their own."""

from __future__ import annotations

import torch

ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""Nodes return no gradient for it; it only makes autograd visit them."""
