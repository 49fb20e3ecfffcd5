"""Checkpoints of jobs that are killed between and during writes, and resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import torchmn
from tests._worlds.jobs import JobResult, run_job
from tests.mpi import killed_training
from tests.training.checkpoint.runs import Training, parameters
from torchmn import create_multi_node_checkpointer

KILLS = """
import os, random, resource, shutil, signal, sys
from pathlib import Path

import numpy, torch, torchmn
from tests.training.checkpoint.runs import Training, parameters, seed_everything
from torchmn.training.checkpoint import create_multi_node_checkpointer, tensor_files

path = Path(sys.argv[1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def half_a_file(target, *tensors):
    '''Writes half a file, then dies.'''
    write(target, *tensors)
    os.truncate(target, target.stat().st_size // 2)
    die()

write = tensor_files.write
"""

EVERY_POINT = (
    KILLS
    + """
# The process is killed before, after and in the middle of every call that changes the disk.
CALLS = [(os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (tensor_files, "write")]
point = 0

def count(die_at, action):
    global point
    point += 1
    if point == die_at:
        action()

def fatal(call, die_at):
    def work(*args):
        count(die_at, die)
        if call is write:
            count(die_at, lambda: half_a_file(*args))
        result = call(*args)
        count(die_at, die)
        return result
    return work

comm = torchmn.create_communicator("solo")

def checkpointer():
    return create_multi_node_checkpointer("run", comm, path / "now", keep=2)

def save(step, saver=None):
    saver = saver or checkpointer()
    saver.save(step, model=torch.nn.Linear(1, 1), extra=torch.full((1000,), float(step)))
    saver.wait()

save(3)
save(4)
shutil.copytree(path / "now", path / "start")

found = []
die_at = 0
while True:
    die_at += 1
    shutil.rmtree(path / "now")
    shutil.copytree(path / "start", path / "now")
    child = os.fork()
    if child == 0:
        mines = checkpointer()
        for module, name in CALLS:
            setattr(module, name, fatal(getattr(module, name), die_at))
        save(5, mines)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    loader = checkpointer()
    found.append(loader.maybe_load())
    assert loader.extra.eq(found[-1]).all(), (die_at, found)
    save(6)
    left = sorted(directory.name for directory in (path / "now").iterdir())
    assert len(left) == 2 and left[-1].startswith("run.step-0000000006"), (die_at, left)
    assert checkpointer().maybe_load() == 6
print("FOUND", "".join(map(str, found)))

# A disk that is full in the middle of a save.
before = sorted((path / "now").rglob("*"))
full = checkpointer()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
try:
    full.save(7, extra=torch.zeros(1000))
    full.wait()
except torchmn.TorchMNError as error:
    refused = f"REFUSED {error}"
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)  # for standard output, too, which may be a file
print(refused)
assert sorted((path / "now").rglob("*")) == before
assert full.maybe_load() == 5
"""
)


def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    result = run_job(EVERY_POINT, 1, "solo", args=[str(tmp_path)], timeout=120)
    assert result.returncode == 0, result.output
    found = result.stdout.split("FOUND ")[1].split()[0]
    before, after = found.count("4"), found.count("5")
    assert found == "4" * before + "5" * after, "first the old one, then the new one, and never none"
    assert before >= 10 and after >= 6, found
    assert "REFUSED rank 0 of 1: save" in result.stdout and "File too large" in result.stdout


ELASTIC = (
    KILLS
    + """
last, dying = int(sys.argv[2]), int(sys.argv[3])
comm = torchmn.create_communicator()
seed_everything(comm.rank)
training = Training(comm)
checkpointer = create_multi_node_checkpointer("run", comm, path)

def draws():
    return (torch.rand(1).item(), numpy.random.rand(), random.random())

done = checkpointer.maybe_load(**training.parts) or 0
drawn = draws()
if done:
    # Generators have different numbers on every rank, and the same ones at every load.
    everyone = [x for numbers in comm.allgather_obj(drawn) for x in numbers]
    assert len(set(everyone)) == len(everyone), everyone
    checkpointer.maybe_load(**training.parts)
    assert draws() == drawn
while done < last:
    training.train(1)
    done += 1
    checkpointer.wait()
    if done == dying and comm.rank == comm.size // 2:
        tensor_files.write = half_a_file
    checkpointer.save(done, **training.parts)
alone = Training(comm.split(comm.rank))
alone.train(last)
numpy.testing.assert_allclose(parameters(training), parameters(alone), rtol=1e-10)
print(f"REACHED {done}")
"""
)


def stage(script: str, n: int, *args: object) -> JobResult:
    result = run_job(script, n, "mpi", args=[str(arg) for arg in args], env={"TORCHMN_TIMEOUT": "40"}, timeout=90)
    assert not result.timed_out, result.output
    assert not result.survivors, result.survivors
    return result


def test_a_job_killed_while_it_writes_resumes_on_two_and_then_on_three_ranks(tmp_path: Path) -> None:
    result = stage(ELASTIC, 4, tmp_path, 100, 6)
    assert result.returncode != 0 and "Error" not in result.output, result.output
    assert (tmp_path / "run.step-0000000005.save-000005").is_dir()
    assert (tmp_path / ".run.step-0000000006.save-000006.partial").is_dir()
    result = stage(ELASTIC, 2, tmp_path, 8, 0)
    assert result.returncode == 0, result.output
    assert result.stdout.count("REACHED 8") == 2
    assert not (tmp_path / ".run.step-0000000006.save-000006.partial").exists()
    assert len(list(tmp_path.iterdir())) == 5

    def go_on(comm: torchmn.Communicator):
        training = Training(comm)
        assert create_multi_node_checkpointer("run", comm, tmp_path).maybe_load(**training.parts) == 8
        training.train(3)
        return parameters(training)

    def uninterrupted(comm: torchmn.Communicator):
        training = Training(comm)
        training.train(11)
        return parameters(training)

    (expected,) = torchmn.run_threads(uninterrupted, 1)
    for result in torchmn.run_threads(go_on, 3):
        np.testing.assert_allclose(result, expected, rtol=1e-10)


DISKS = (
    KILLS
    + """
comm = torchmn.create_communicator()
training = Training(comm)
checkpointer = create_multi_node_checkpointer("run", comm, path / f"disk {comm.rank}")
for step in (1, 2, 3):
    training.train(1)
    checkpointer.wait()
    if step == 3 and comm.rank == 1:
        os.rename = lambda *_: die()
    checkpointer.save(step, extra=comm.rank, **training.parts)
"""
)


def test_a_job_killed_before_one_disk_has_its_checkpoint_resumes_from_the_one_before(tmp_path: Path) -> None:
    result = stage(DISKS, 2, tmp_path)
    assert result.returncode != 0 and "Error" not in result.output, result.output
    assert not (tmp_path / "disk 1" / "run.step-0000000003.save-000003").exists()

    def go_on(comm: torchmn.Communicator):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / f"disk {comm.rank}")
        resumed, whole = Training(comm), Training(comm)
        assert checkpointer.maybe_load(**resumed.parts) == 2
        assert checkpointer.extra == comm.rank
        resumed.train(3)
        whole.train(5)
        assert resumed.result() == whole.result()

    torchmn.run_threads(go_on, 2)


def test_a_training_that_is_killed_at_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    loaded = killed_training.run(tmp_path, kills=2, ranks=2, transport="mpi")
    assert loaded == sorted(loaded)
