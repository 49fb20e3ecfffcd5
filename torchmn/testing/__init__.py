"""Tests on several ranks, for pytest.

    from torchmn.testing import ranks

    @ranks(1, 2, 4)
    def test_every_rank_gets_the_sum(comm):
        assert comm.allreduce(torch.ones(1)).item() == comm.size

The body runs on every rank. pytest finds the plugin (torchmn/testing/plugin.py) where TorchMN is installed.
"""

from torchmn.other_spellings import module_attribute
from torchmn.testing.worlds import ranks

__all__ = ["ranks"]


def __getattr__(name: str) -> object:
    return module_attribute("testing", name, ("get_device",))
