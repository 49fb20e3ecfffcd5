"""Guards of parallel models: each refuses a use that would silently give other numbers than one rank computes.

Importing a file of this package registers its guard in the table `events.GUARDS`. The table loads the package by name;
no other file imports it.
"""

from torchmn.parallel.guards import (  # noqa: F401
    batch_dependent_embeddings,
    buffer_averages,
    compiled_code,
    custom_autograd,
    different_losses,
    images_in_objects,
    inplace_views,
    plain_optimizer,
    sample_mixing,
    sharded_buffers,
    submodule_calls,
    tracing,
)
