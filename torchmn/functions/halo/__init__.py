"""The exchange of halos between tiles, differentiable."""
