"""The switchboard: what one rank says, all hear, whenever they came."""

from __future__ import annotations

from torchmn.communicators.switchboard import Line, Server

HOST = "127.0.0.1"
SECONDS = 20.0


def line(server: Server, rank: int) -> Line:
    return Line(rank, HOST, server.port, server.key)


def test_all_ranks_hear_all_words_in_the_same_order() -> None:
    server = Server(HOST, 3)
    lines = [line(server, rank) for rank in range(3)]
    for number in range(20):
        lines[number % 3].say({"number": number})
    heard = [[each.hear(SECONDS) for _ in range(20)] for each in lines]
    assert heard[0] == heard[1] == heard[2]
    assert sorted(words["number"] for words in heard[0] if words) == list(range(20))


def test_a_rank_that_is_let_in_last_hears_what_was_said_before() -> None:
    server = Server(HOST, 2)
    early = line(server, 1)
    early.say({"kind": "left", "rank": 1})
    assert early.hear(SECONDS) == {"kind": "left", "rank": 1}  # it was repeated to all who were there
    assert line(server, 0).hear(SECONDS) == {"kind": "left", "rank": 1}


def test_a_rank_that_is_let_in_last_hears_who_was_lost_before() -> None:
    server = Server(HOST, 3)
    witness, lost = line(server, 1), line(server, 2)
    witness.say({"kind": "hello"})
    assert witness.hear(SECONDS) == {"kind": "hello"}
    lost._connection.close()
    assert witness.hear(SECONDS) == {"kind": "lost", "rank": 2}
    late = line(server, 0)
    assert [late.hear(SECONDS), late.hear(SECONDS)] == [{"kind": "hello"}, {"kind": "lost", "rank": 2}]
