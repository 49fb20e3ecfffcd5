"""Steps that would silently let ranks part ways: each guard is an entry of the table `events.GUARDS`.

Nobody imports this package but `events.load_guards`, by name.
"""

from torchmn.optim.guards import (  # noqa: F401  (importing a guard registers it)
    clipping,
    settings,
    values,
)
