"""The control channel: every message arrives at all ranks in the same order, whenever they connect."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from torchmn.communicators.launchers.addresses import of_this_host
from torchmn.communicators.watchdog.control_channel import ControlClient, ControlServer

HOST = "127.0.0.1"
SECONDS = 20.0
HELLO = {"kind": "hello", "rank": 0}


def client(server: ControlServer, rank: int) -> ControlClient:
    return ControlClient(rank, [HOST], server.port, server.key)


def test_all_ranks_receive_all_messages_in_the_same_order() -> None:
    server = ControlServer(3, to_other_hosts=False)
    clients = [client(server, rank) for rank in range(3)]
    for number in range(20):
        clients[number % 3].send({"kind": "count", "rank": number % 3, "number": number})
    received = [[each.receive(SECONDS) for _ in range(20)] for each in clients]
    assert received[0] == received[1] == received[2]
    assert sorted(message["number"] for message in received[0] if message) == list(range(20))


def test_a_rank_that_connects_last_receives_earlier_messages() -> None:
    server = ControlServer(2, to_other_hosts=False)
    early = client(server, 1)
    early.send({"kind": "left", "rank": 1})
    assert early.receive(SECONDS) == {"kind": "left", "rank": 1}  # forwarded to all connected ranks
    assert client(server, 0).receive(SECONDS) == {"kind": "left", "rank": 1}


def test_a_rank_that_connects_last_receives_which_ranks_were_lost_before() -> None:
    server = ControlServer(3, to_other_hosts=False)
    witness, lost = client(server, 1), client(server, 2)
    hello = {"kind": "hello", "rank": 1}
    witness.send(hello)
    assert witness.receive(SECONDS) == hello
    lost._connection.close()
    assert witness.receive(SECONDS) == {"kind": "lost", "rank": 2}
    late = client(server, 0)
    assert [late.receive(SECONDS), late.receive(SECONDS)] == [hello, {"kind": "lost", "rank": 2}]


def test_a_rank_finds_rank_0_by_the_one_of_its_addresses_that_leads_there() -> None:
    server = ControlServer(1, to_other_hosts=False)
    another_job = ControlServer(1, to_other_hosts=True)
    silent, refused, other = "127.0.0.2", "127.0.0.3", "127.0.0.4"
    with socket.create_server((silent, server.port)), socket.create_server((other, server.port)) as stranger:
        threading.Thread(target=lambda: stranger.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")).start()
        found = ControlClient(0, [silent, refused, other, HOST], server.port, server.key)
    found.send(HELLO)
    assert found.receive(SECONDS) == HELLO
    with pytest.raises(ConnectionError, match=f"{HOST}: digest"):  # another server answers, without the key
        ControlClient(0, [HOST], another_job.port, server.key)


def test_a_connection_that_sends_nothing_delays_no_rank() -> None:
    server = ControlServer(1, to_other_hosts=False)
    with socket.create_connection((HOST, server.port)):
        rank = client(server, 0)
        rank.send(HELLO)
        assert rank.receive(SECONDS) == HELLO


def test_the_port_for_other_hosts_is_reached_by_every_address_of_this_one_and_closed_behind_the_last_rank() -> None:
    addresses = [HOST, *of_this_host()[1:]]
    server = ControlServer(len(addresses), to_other_hosts=True)
    clients = [ControlClient(rank, [address], server.port, server.key) for rank, address in enumerate(addresses)]
    clients[0].send(HELLO)
    assert [each.receive(SECONDS) for each in clients] == [HELLO] * len(clients)
    with pytest.raises(ConnectionError, match="refused"):
        client(server, 0)


@pytest.mark.parametrize("rank", [77, -1, "0", None])
def test_a_rank_out_of_range_is_refused(rank: object) -> None:
    server = ControlServer(2, to_other_hosts=False)
    stranger = client(server, rank)
    with pytest.raises((EOFError, OSError)):
        stranger.receive(SECONDS)
    first = client(server, 0)
    first.send(HELLO)
    assert first.receive(SECONDS) == HELLO


def test_a_second_connection_of_a_rank_is_refused() -> None:
    server = ControlServer(2, to_other_hosts=False)
    first = client(server, 0)
    first.send(HELLO)
    assert first.receive(SECONDS) == HELLO
    with pytest.raises((EOFError, OSError)):
        client(server, 0).receive(SECONDS)
    client(server, 1).send({"kind": "hello", "rank": 1})
    assert first.receive(SECONDS) == {"kind": "hello", "rank": 1}


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff",
        b"[1]",
        b"{}",
        b'{"kind": "left"}',
        json.dumps({"kind": "left", "rank": 0}).encode(),
        b"1" * (1 << 25),
    ],
    ids=["no JSON", "a list", "no kind", "no rank", "another rank", "too long"],
)
def test_a_rank_that_sends_garbage_is_lost_and_the_others_stay_connected(garbage: bytes) -> None:
    server = ControlServer(2, to_other_hosts=False)
    witness, broken = client(server, 0), client(server, 1)
    with suppress(OSError):  # the server may refuse a long message before its end
        broken._connection.send_bytes(garbage)
    assert witness.receive(SECONDS) == {"kind": "lost", "rank": 1}
    witness.send(HELLO)
    assert witness.receive(SECONDS) == HELLO


def test_connections_that_do_not_introduce_themselves_are_limited_and_ranks_still_connect() -> None:
    server = ControlServer(1, to_other_hosts=False)
    silent = [socket.create_connection((HOST, server.port)) for _ in range(100)]
    rank = client(server, 0)
    rank.send(HELLO)
    assert rank.receive(SECONDS) == HELLO
    silent[0].settimeout(SECONDS)
    while silent[0].recv(1024):  # the server's challenge, then the end: the oldest one was closed
        pass
    assert sum(thread.name == "torchmn-handshake" for thread in threading.enumerate()) < 100
    for each in silent:
        each.close()


FULL = """
import os, resource, socket
from torchmn.communicators.watchdog.control_channel import ControlClient, ControlServer
server = ControlServer(1, to_other_hosts=False)
outside = socket.socket()
opened = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True: opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
outside.connect(("127.0.0.1", server.port))  # the server cannot accept it: no file is left
outside.settimeout(0.5)
try: print("ANSWERED", outside.recv(1))
except TimeoutError: print("FULL")
for each in opened: os.close(each)
rank = ControlClient(0, ["127.0.0.1"], server.port, server.key)
rank.send({"kind": "hello", "rank": 0})
print(rank.receive(20.0))
"""


def test_the_server_accepts_connections_again_after_the_process_ran_out_of_files() -> None:
    result = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == ["FULL", "{'kind': 'hello', 'rank': 0}"], result.stderr
