"""By which addresses this host can be reached, and which of them leads to another host."""

from __future__ import annotations

import array
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LIST_IPV4 = 0x8912  # SIOCGIFCONF: the IPv4 addresses of all interfaces that are up, 40 bytes each
_INTERFACES_IPV6 = Path("/proc/net/if_inet6")
_MOST_ADDRESSES = 128
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a number that the kernel drew when it was started
_NETWORK = Path("/proc/self/ns/net")


def of_this_host() -> list[str]:
    """What other hosts may find this one by: its name, and the addresses of its interfaces.

    The name comes first, but may lead nowhere: there may be no entry for it, or, as Debian has it, one of 127.0.1.1.
    """
    found = [socket.gethostname()]
    with suppress(Exception):  # no Linux: then the name must do
        found += [address for address in (*_ipv4(), *_ipv6()) if not is_loopback(address)]
    return list(dict.fromkeys(found))


def network() -> str | None:
    """A name for the network of this process: processes with the same one share a loopback interface; None if unknown.

    Hosts have one each, and so have most containers.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:  # no Linux
        return None


def named() -> str | None:
    """The address of this machine that its name leads to here, as gloo looks for it; None if there is none."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def facing(host: str) -> str | None:
    """The address of this machine that packets to `host` would carry, none of which is sent; None if no way leads."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether an address leads every host to itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _ipv4() -> Iterator[str]:
    from fcntl import ioctl  # not everywhere

    room = array.array("B", bytes(40 * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iP", len(room), room.buffer_info()[0])
        filled = struct.unpack("iP", ioctl(any_socket.fileno(), _LIST_IPV4, asked))[0]
    for start in range(0, filled, 40):
        yield socket.inet_ntoa(room[start + 20 : start + 24].tobytes())


def _ipv6() -> Iterator[str]:
    if not _INTERFACES_IPV6.exists():
        return
    for line in _INTERFACES_IPV6.read_text().splitlines():
        digits, _, _, scope, *_ = line.split()
        if scope == "00":  # global: others need a name of an interface, too
            yield str(ipaddress.IPv6Address(bytes.fromhex(digits)))
