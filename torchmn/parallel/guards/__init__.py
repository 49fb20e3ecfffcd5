"""What users may do with a parallel model that would silently give other numbers than one rank has: it is refused.

Each guard is an entry of the table `events.GUARDS`, registered by importing its file. `events.GUARDS` loads this
package by name; no file imports it.
"""

from torchmn.parallel.guards import (  # noqa: F401  (importing a guard registers it)
    changed_views,
    compiled_modules,
    embeddings,
    hidden_images,
    outside_calls,
    own_averages,
    own_functions,
    plain_optimizer,
    same_loss,
    scripts,
    sharded_buffers,
    tracing,
)
