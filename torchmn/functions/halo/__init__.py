"""Differentiable halo exchange. Reading order: `exchange`, `messages` (their layout), `global_array`."""
