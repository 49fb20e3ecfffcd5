"""Communicators: groups of ranks, their operations, and the transports below them.

Start with `communicator.py`. `agreement.py` compares ranks before they communicate, `buffers.py` moves tensors over a
transport of `transports/`, and `replies.py` sends messages that request replies. `watchdog/` ends jobs that are stuck,
`launchers/` reads how the ranks were started, and `fastpath/` (optional) is faster on one host.
"""

from torchmn.other_spellings import module_attribute


def __getattr__(name: str) -> object:
    # Python also looks up submodules here, while they are being imported.
    return module_attribute("communicators", name, ("CommunicatorBase", "create_communicator"))
