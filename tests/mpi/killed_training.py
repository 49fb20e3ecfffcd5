"""A training that saves in every step and is killed at random moments, resumed after each, and compared at the end.

python -m tests.mpi.killed_training --kills 25 --ranks 2
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from pathlib import Path

from tests._worlds.jobs import run_job

LATEST = 1.0
"""Seconds after the first step until a rank is killed, at most."""

SCRIPT = """
import os, signal, sys, threading, time
from hashlib import sha256

import torch, torchmn
from tests.training.checkpoint.runs import Training, seed_everything

directory, last, rank, delay = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
comm = torchmn.create_communicator()
seed_everything(comm.rank)
training = Training(comm, noise=True)
weights = torch.zeros(300_000)  # common to all ranks, so that a write takes a while
mine = torch.full((100_000,), float(comm.rank))

def step():
    training.train(1)
    weights.add_(torch.linspace(0, training.optimizer.param_groups[0]["lr"], len(weights)))
    mine.mul_(1.001)

def die():
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)

done = 0
if directory:
    checkpointer = torchmn.create_multi_node_checkpointer("run", comm, directory, keep=3)
    done = checkpointer.maybe_load(**training.parts) or 0
    if done:
        weights, mine = checkpointer.extra
if comm.rank == 0:
    print("LOADED", done, flush=True)
last = last or done + 3
while done < last or rank >= 0:
    step()
    done += 1
    if directory:
        checkpointer.save(done, extra=(weights, mine), **training.parts)
    if rank == comm.rank:
        threading.Thread(target=die, daemon=True).start()
        rank = comm.size  # once
digests = comm.allgather_obj(sha256(repr((training.result(), weights.tolist(), mine.tolist())).encode()).hexdigest())
if comm.rank == 0:
    print("REACHED", done, *digests, flush=True)
"""


def run(directory: Path, kills: int, ranks: int, transport: str, seed: int = 0) -> list[int]:
    """Returns the step that each run has loaded, after checking that the last one ended as an uninterrupted run."""
    generator = random.Random(seed)
    loaded = []

    def job(path: Path | str, *options: object) -> str:
        result = run_job(SCRIPT, ranks, transport, args=[str(path), *map(str, options)], timeout=120)
        assert not result.timed_out, result.output
        found = re.search(r"LOADED (\d+)", result.stdout)
        assert found, result.output
        loaded.append(int(found[1]))
        return result.output

    for _ in range(kills):
        newest = newest_step(directory)
        output = job(directory, 0, generator.randrange(ranks), generator.uniform(0, LATEST))
        # Over gloo the other ranks may find the connection closed before they are ended.
        errors = set(re.findall(r"^[\w.]*?(\w*Error): ", output, re.MULTILINE)) - {"PeerError"}
        assert "REACHED" not in output and not errors, output
        assert loaded[-1] == newest, output
    newest = newest_step(directory)
    resumed = re.search(r"REACHED (\d+) (.*)", job(directory, 0, -1, 0))
    assert resumed and loaded[-1] == newest
    uninterrupted = re.search(r"REACHED (\d+) (.*)", job("", resumed[1], -1, 0))
    assert uninterrupted and uninterrupted[0] == resumed[0]
    return loaded[:-1]


def newest_step(directory: Path) -> int:
    """Returns the step of the newest checkpoint that is complete."""
    found = [re.match(r"run\.step-(\d+)\.save", path.name) for path in directory.iterdir()]
    return max((int(match[1]) for match in found if match), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transport", default="mpi")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        loaded = run(Path(directory), options.kills, options.ranks, options.transport, options.seed)
    print(f"killed {options.kills} times, resumed bit for bit from steps {loaded}")


if __name__ == "__main__":
    main()
