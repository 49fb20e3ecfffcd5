"""What users may do with a parallel model that would silently give other numbers than one rank has: it is refused.

Each guard is an entry of the table `events.GUARDS`, registered by importing its file. `events.GUARDS` loads this
package by name; no file imports it.
"""

from torchmn.parallel.guards import (  # noqa: F401
    buffer_averages,
    compiled_modules,
    custom_autograd,
    embeddings,
    hidden_images,
    inplace_views,
    outside_calls,
    plain_optimizer,
    same_loss,
    scripts,
    sharded_buffers,
    tracing,
)
