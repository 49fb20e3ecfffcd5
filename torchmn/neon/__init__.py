"""Names of Nervana neon's Python classes, for errors that contain what to use instead: other_spellings.py.

The core does not import this package, which is loaded by name when a name is not found. Experiment files of neon are
converted by torchmn.experiment.neon.
"""

from torchmn.neon.names import NAMES
from torchmn.other_spellings import advice

__all__ = ["NAMES"]

for _entry in NAMES:
    _instead = f"torchmn.{_entry.here}" if _entry.here else _entry.note
    for _module in ("", "nn", "models"):
        advice[f"{_module}.{_entry.name}".removeprefix(".")] = _instead
