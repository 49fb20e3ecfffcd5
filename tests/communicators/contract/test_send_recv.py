"""send and recv: values and order of messages, and senders that do not wait for receivers."""

import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from tests._worlds import every_world_of_several, ranks
from tests._worlds.data import (
    assert_refused,
    assert_same,
    assert_same_tuple,
    assert_still_works,
    bits,
    odd_layouts,
)

# More than any MPI sends eagerly: a send that waited for its receiver would hang a ring of senders.
LARGE = 3_000_000


@every_world_of_several
@ranks(2, 3, on="openmpi")
def test_all_ranks_of_a_ring_may_send_before_they_receive(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (0, 1, 1000, LARGE // comm.size):
        comm.send(bits((length,), torch.uint8, comm.rank, length), right)
        assert_same(comm.recv(left), bits((length,), torch.uint8, left, length), length)


@every_world_of_several
def test_every_rank_can_send_to_every_rank(comm):
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    for peer in others:
        comm.send(bits((comm.rank, peer), torch.float64, comm.rank, peer), peer, tag=5)
    for peer in reversed(others):
        assert_same(comm.recv(peer, tag=5), bits((peer, comm.rank), torch.float64, peer, comm.rank))


@ranks(2)
@ranks(2, on="openmpi")
def test_messages_of_one_tag_arrive_in_the_order_they_were_sent(comm):
    lengths = [7, 0, LARGE, 1, 300, 40_000, 3, LARGE, 2]
    if comm.rank == 0:
        for number, length in enumerate(lengths):
            comm.send(bits((length,), torch.uint8, number), 1, tag=3)
            comm.send_obj(("object", number), 1, tag=4)
    else:
        for number, length in enumerate(lengths):
            assert_same(comm.recv(0, tag=3), bits((length,), torch.uint8, number), number)
        for number in range(len(lengths)):
            assert comm.recv_obj(0, tag=4) == ("object", number)


@ranks(2, 3)
def test_messages_of_different_tags_are_received_in_any_order(comm):
    tags = [0, 1, 30_000]
    if comm.rank == 0:
        for tag in tags:
            for number, length in enumerate((4, LARGE)):
                comm.send(bits((length,), torch.uint8, tag, number), comm.size - 1, tag)
    elif comm.rank == comm.size - 1:
        for tag in reversed(tags):
            for number, length in enumerate((4, LARGE)):
                assert_same(comm.recv(0, tag), bits((length,), torch.uint8, tag, number), (tag, number))


@ranks(2)
@ranks(2, on="openmpi")
def test_the_sender_may_change_or_drop_its_tensor_at_once(comm):
    for length in (10, 1000, LARGE):
        if comm.rank == 0:
            x = bits((length,), torch.uint8, length)
            comm.send(x, 1, tag=1)
            x.zero_()
            comm.send(bits((length,), torch.uint8, length, 1), 1, tag=1)
            gc.collect()
            torch.full((length,), 7, dtype=torch.uint8)  # takes the memory of what was dropped too early
            comm.send_obj("sent", 1, tag=2)
        else:
            assert comm.recv_obj(0, tag=2) == "sent"
            assert_same(comm.recv(0, tag=1), bits((length,), torch.uint8, length), f"changed, {length}")
            assert_same(comm.recv(0, tag=1), bits((length,), torch.uint8, length, 1), f"dropped, {length}")


@ranks(2)
def test_received_values_do_not_share_memory_with_those_sent(comm):
    x = bits((100,), torch.uint8, 1)
    if comm.rank == 0:
        comm.send(x, 1)
        comm.barrier()
        x.zero_()
        comm.barrier()
        assert int(x.sum()) == 0
    else:
        received = comm.recv(0)
        comm.barrier()
        comm.barrier()
        assert_same(received, x)
        received.fill_(1)
    comm.barrier()


@ranks(2)
@ranks(2, on="openmpi")
def test_a_tuple_or_list_arrives_as_a_tuple_and_a_tensor_as_a_tensor(comm):
    mixed = [
        bits((2, 3), torch.float32, 1),
        bits((), torch.int64, 2),
        bits((0, 4), torch.bool, 3),
        bits((5,), torch.complex64, 4),
        bits((LARGE // 4,), torch.bfloat16, 5),
        bits((3,), torch.uint8, 6),
    ]
    if comm.rank == 0:
        for x in (tuple(mixed), mixed, mixed[:1], (), [], mixed[0]):
            comm.send(x, 1)
    else:
        assert_same_tuple(comm.recv(0), mixed, "tuple")
        assert_same_tuple(comm.recv(0), mixed, "list")
        assert_same_tuple(comm.recv(0), mixed[:1], "a list of one")
        assert comm.recv(0) == ()
        assert comm.recv(0) == ()
        assert_same(comm.recv(0), mixed[0], "a tensor")


@ranks(2)
def test_tensors_of_any_layout_arrive_with_their_values_and_without_their_graph(comm):
    for name, x in odd_layouts(1).items():
        if comm.rank == 0:
            comm.send(x, 1)
            comm.send((x, x), 1)
        else:
            assert_same(comm.recv(0), x.detach(), name)
            assert_same_tuple(comm.recv(0), (x.detach(), x.detach()), name)


@ranks(2)
def test_receiving_with_the_wrong_method_names_the_right_one(comm):
    x = torch.arange(3)

    def receive_an_object_as_a_tensor():
        comm.recv(0)

    if comm.rank == 0:
        comm.send_obj("an object", 1)
        comm.send(x, 1)
        assert_still_works(comm)
        assert_still_works(comm)
    else:
        assert_refused(comm, receive_an_object_as_a_tensor, "rank 1", "recv", "recv_obj")
        assert_refused(comm, lambda: comm.recv_obj(0), "rank 1", "recv_obj", "send")


@ranks(2, 3)
def test_a_send_that_is_refused_raises_at_its_receiver(comm):
    import torchmn

    wrong = {
        "a string": (comm.send, "text"),
        "a tuple with a string": (comm.send, (torch.ones(2), "text")),
        "None": (comm.send, None),
        "an object that does not pickle": (comm.send_obj, lambda: None),
        "a sparse tensor": (comm.send, torch.eye(2).to_sparse()),
    }
    for name, (send, x) in wrong.items():
        receive = comm.recv_obj if send == comm.send_obj else comm.recv
        if comm.rank == 0:
            expected = torchmn.ArgumentError
            assert_refused(comm, lambda send=send, x=x: send(x, comm.size - 1), "rank 0", "send", kind=expected)
        elif comm.rank == comm.size - 1:
            expected = torchmn.PeerError
            assert_refused(comm, lambda receive=receive: receive(0), "rank 0", "send", kind=expected)
        else:
            assert_still_works(comm)
        assert name


@ranks(1, 2, 3)
def test_a_wrong_peer_or_tag_is_refused(comm):
    import torchmn

    x, me, other = torch.ones(2), comm.rank, (comm.rank + 1) % comm.size
    wrong = [
        (lambda: comm.send(x, me), ("send", "itself")),
        (lambda: comm.recv(me), ("recv", "itself")),
        (lambda: comm.send_obj("x", me), ("send_obj", "itself")),
        (lambda: comm.recv_obj(me), ("recv_obj", "itself")),
        (lambda: comm.send(x, comm.size), ("send", "dest", str(comm.size))),
        (lambda: comm.send(x, -1), ("send", "dest", "-1")),
        (lambda: comm.recv(comm.size + 3), ("recv", "source", str(comm.size + 3))),
        (lambda: comm.recv(1.0), ("recv", "source", "1.0")),
        (lambda: comm.send(x, "0"), ("send", "dest", "'0'")),
    ]
    if comm.size > 1:
        wrong += [
            (lambda: comm.send(x, other, tag=-1), ("send", "tag", "-1")),
            (lambda: comm.recv(other, tag="a"), ("recv", "tag", "'a'")),
            (lambda: comm.recv_obj(other, tag=1 << 40), ("recv_obj", "tag")),
        ]
    for call, words in wrong:
        assert_refused(comm, call, f"rank {me}", *words, kind=torchmn.ArgumentError)


@ranks(2)
def test_what_was_sent_arrives_even_if_its_sender_drops_the_communicator_at_once(comm):
    sizes = (3, 30_000, 2_000_000)
    group = comm.split(0)
    if comm.rank == 0:
        for size in sizes:
            group.send(torch.full((size,), float(size)), 1)
        del group
        gc.collect()
        assert all(torch.full((size,), -1.0).lt(0).all() for size in sizes)  # memory that was freed is used again
    comm.barrier()
    if comm.rank == 1:
        for size in sizes:
            received = group.recv(0)
            assert received.shape == (size,)
            assert received.eq(size).all()


@ranks(2)
def test_threads_of_a_rank_may_send_and_receive_at_once_each_with_its_own_tag(comm):
    peer, wrong = 1 - comm.rank, []

    def talk(tag: int) -> None:
        for turn, size in enumerate((3, 20_000, 20_000, 150_000, 2_000)):
            x = torch.full((size,), 10.0 * tag + turn)
            if (comm.rank + tag) % 2:
                comm.send(x, peer, tag)
            received = comm.recv(peer, tag)
            if not (comm.rank + tag) % 2:
                comm.send(x, peer, tag)
            if received.shape != x.shape or not received.equal(x):
                wrong.append((tag, turn))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(talk, range(6)))
    assert wrong == []
