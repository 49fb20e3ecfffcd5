"""barrier: no rank returns before all ranks have called it."""

from tests._worlds import every_world, ranks


@every_world
@ranks(3, on="openmpi")
def test_nobody_leaves_before_everybody_has_come(comm, tmp_path):
    for turn in range(5):
        (tmp_path / f"{turn}-{comm.rank}").touch()
        comm.barrier()
        absent = [rank for rank in range(comm.size) if not (tmp_path / f"{turn}-{rank}").exists()]
        assert not absent, f"rank {comm.rank} left barrier {turn} before ranks {absent} had come"
