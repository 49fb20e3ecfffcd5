"""Steps that would silently let ranks part ways: each guard is an entry of the table `events.GUARDS`.

`events.GUARDS` loads this package by name; no file imports it.
"""

from torchmn.optim.guards import clipping, settings, values  # noqa: F401
