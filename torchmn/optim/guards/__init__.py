"""Guards of a multi-node optimizer: each raises an error before a step after which ranks would silently diverge.

`events.GUARDS` loads this package by name; no file imports it.
"""

from torchmn.optim.guards import background_failures, clipping, replica_consistency, settings  # noqa: F401
