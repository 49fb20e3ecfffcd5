"""Network addresses of this host, and which of them other hosts can reach."""

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
_MAX_ADDRESSES = 128
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a random number of each boot
_NETWORK = Path("/proc/self/ns/net")


def of_this_host() -> list[str]:
    """Returns the names under which other hosts may reach this one: its host name, and the addresses of its interfaces.

    The host name is first, but may not work: it may have no address, or, as on Debian, 127.0.1.1.
    """
    found = [socket.gethostname()]
    with suppress(Exception):  # not on Linux: only the name
        found += [address for _, address in _interfaces() if not is_loopback(address)]
    return list(dict.fromkeys(found))


def network() -> str | None:
    """Returns an id of this process's network namespace; None if unknown. Hosts and most containers have one each.

    Processes with the same id share a loopback interface.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:  # not on Linux
        return None


def loopback_interface() -> str | None:
    """Returns the name of this host's loopback interface; None if it has another name than usual."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has an address; None if there is none, or unknown."""
    with suppress(Exception):  # not on Linux
        return next((name for name, each in _interfaces() if each == address), None)
    return None


def address_of_hostname() -> str | None:
    """Returns the address of this host's name, by the search that gloo makes; None if there is none."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def facing(host: str) -> str | None:
    """Returns the address from which this host would send to `host`, without sending; None if there is no route."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Returns whether an address leads every host to itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yields the names and addresses of the interfaces of this host; one with several addresses comes several times."""
    yield from _ipv4()
    yield from _ipv6()


def _ipv4() -> Iterator[tuple[str, str]]:
    from fcntl import ioctl  # not on Windows

    buffer = array.array("B", bytes(40 * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        filled = struct.unpack("iP", ioctl(any_socket.fileno(), _LIST_IPV4, request))[0]
    for start in range(0, filled, 40):
        name = buffer[start : start + 16].tobytes().partition(b"\0")[0].decode()
        yield name.partition(":")[0], socket.inet_ntoa(buffer[start + 20 : start + 24].tobytes())


def _ipv6() -> Iterator[tuple[str, str]]:
    if not _INTERFACES_IPV6.exists():
        return
    for line in _INTERFACES_IPV6.read_text().splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == "00":  # global: addresses of other scopes need the name of an interface
            yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))
