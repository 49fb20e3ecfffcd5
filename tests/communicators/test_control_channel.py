"""The control channel: every message arrives at all ranks in the same order, whenever they connect."""

from __future__ import annotations

import socket
import threading

import pytest

from torchmn.communicators.launchers.addresses import of_this_host
from torchmn.communicators.watchdog.control_channel import ControlClient, ControlServer

HOST = "127.0.0.1"
SECONDS = 20.0


def client(server: ControlServer, rank: int) -> ControlClient:
    return ControlClient(rank, [HOST], server.port, server.key)


def test_all_ranks_receive_all_messages_in_the_same_order() -> None:
    server = ControlServer(3, to_other_hosts=False)
    clients = [client(server, rank) for rank in range(3)]
    for number in range(20):
        clients[number % 3].send({"number": number})
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
    witness.send({"kind": "hello"})
    assert witness.receive(SECONDS) == {"kind": "hello"}
    lost._connection.close()
    assert witness.receive(SECONDS) == {"kind": "lost", "rank": 2}
    late = client(server, 0)
    assert [late.receive(SECONDS), late.receive(SECONDS)] == [{"kind": "hello"}, {"kind": "lost", "rank": 2}]


def test_a_rank_finds_rank_0_by_the_one_of_its_addresses_that_leads_there() -> None:
    server = ControlServer(1, to_other_hosts=False)
    another_job = ControlServer(1, to_other_hosts=True)
    silent, refused, other = "127.0.0.2", "127.0.0.3", "127.0.0.4"
    with socket.create_server((silent, server.port)), socket.create_server((other, server.port)) as stranger:
        threading.Thread(target=lambda: stranger.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")).start()
        found = ControlClient(0, [silent, refused, other, HOST], server.port, server.key)
    found.send({"kind": "hello"})
    assert found.receive(SECONDS) == {"kind": "hello"}
    with pytest.raises(ConnectionError, match=f"{HOST}: digest"):  # another server answers, without the key
        ControlClient(0, [HOST], another_job.port, server.key)


def test_a_connection_that_sends_nothing_delays_no_rank() -> None:
    server = ControlServer(1, to_other_hosts=False)
    with socket.create_connection((HOST, server.port)):
        rank = client(server, 0)
        rank.send({"kind": "hello"})
        assert rank.receive(SECONDS) == {"kind": "hello"}


def test_the_port_for_other_hosts_is_reached_by_every_address_of_this_one_and_closed_behind_the_last_rank() -> None:
    addresses = [HOST, *of_this_host()[1:]]
    server = ControlServer(len(addresses), to_other_hosts=True)
    clients = [ControlClient(rank, [address], server.port, server.key) for rank, address in enumerate(addresses)]
    clients[0].send({"kind": "hello"})
    assert [each.receive(SECONDS) for each in clients] == [{"kind": "hello"}] * len(clients)
    with pytest.raises(ConnectionError, match="refused"):
        client(server, 0)
