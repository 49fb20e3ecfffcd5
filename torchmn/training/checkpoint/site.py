"""Where a checkpointer works."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchmn.communicators.communicator import Communicator
from torchmn.training.checkpoint.library import Library
from torchmn.training.checkpoint.snapshot import Identity


@dataclass
class Site:
    """The ranks that save together, and this rank's disk among theirs."""

    comm: Communicator
    library: Library
    disk_ranks: list[int]
    """The ranks that see this rank's directory."""
    spoiled: set[Identity] = field(default_factory=set)
    """Checkpoints that look whole, and were found damaged when they were read."""

    @property
    def leads(self) -> bool:
        """Whether this rank acts for all ranks on its disk."""
        return self.comm.rank == self.disk_ranks[0]
