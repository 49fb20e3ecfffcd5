"""Saving and loading a model: TorchMN beside safetensors, torch.save and torch.distributed.checkpoint (DCP).

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py

One process. States are 4 to 400 MB in tensors of 4 MB, and 100 to 10,000 tensors of 1 KB. All files are on disk when a
save ends, and the files of the save before stay until then: safetensors and torch.save write a new file, call fsync and
rename the file; DCP, which calls fsync itself, writes a new directory.
  save    until the checkpoint is complete; of TorchMN, `save` and `wait`
  pause   until training may continue: of TorchMN, `save` alone; of `copy`, one copy of the state into memory that is
          used again; of DCP, `async_save`; of safetensors, all of its save
  load    into the parameters of a model, from files in memory; of TorchMN with all checksums, of others without

Counts are of one save: the calls of fsync, and the memory at its peak beyond that before it, in MB. TorchMN keeps its
copy of the state for the next save.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from results import Results, Work, arguments
from safetensors.torch import load_file, save_file
from torch import nn

import torchmn

MEGABYTES = {f"{count * 4} MB": (count, 1 << 20) for count in (1, 10, 100)}
TENSORS = {f"{count:,} tensors": (count, 256) for count in (100, 1000, 10_000)}
LONGEST = 20
"""Seconds after which no further turn of an operation begins."""


class Contender(NamedTuple):
    """What is timed, and what is to be done after it."""

    run: Callable[[], object]
    after: Callable[[], object] = lambda: None


class Tensors(nn.Module):
    """`count` parameters with `numel` elements each."""

    def __init__(self, count: int, numel: int):
        super().__init__()
        self.tensors = nn.ParameterList([torch.randn(numel) for _ in range(count)])


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a new file, wait until it is on disk, and give it the name of the old one."""
    new = path.with_name(f"{path.name}.new")
    write(new)
    descriptor = os.open(new, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(new, path)


def contenders(model: nn.Module, comm: torchmn.Communicator, directory: Path) -> dict[str, dict[str, Contender]]:
    """The contenders of each operation."""
    checkpointer = torchmn.create_multi_node_checkpointer("run", comm, directory, keep=1)
    plain, pickled, distributed, new = (directory / name for name in ("plain", "pickled", "distributed", "new"))
    copies = {name: torch.empty_like(x) for name, x in model.state_dict().items()}

    def copy() -> None:
        for name, x in model.state_dict().items():
            copies[name].copy_(x)

    def save() -> None:
        checkpointer.save(1, model=model)
        checkpointer.wait()

    def safetensors() -> None:
        replace(plain, lambda path: save_file(model.state_dict(), path))

    def torch_save() -> None:
        replace(pickled, lambda path: torch.save(model.state_dict(), path))

    def dcp_save() -> None:
        dcp.save(model.state_dict(), checkpoint_id=new, no_dist=True)

    def dcp_replace() -> None:
        shutil.rmtree(distributed, ignore_errors=True)
        new.rename(distributed)

    def dcp_load() -> None:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=distributed, no_dist=True)

    started = []

    def dcp_async() -> None:
        started.append(dcp.async_save(model.state_dict(), checkpoint_id=new))

    def dcp_wait() -> None:
        started.pop().result()
        dcp_replace()

    return {
        "save": {
            "TorchMN": Contender(save),
            "safetensors": Contender(safetensors),
            "torch.save": Contender(torch_save),
            "DCP": Contender(dcp_save, dcp_replace),
        },
        "pause": {
            "TorchMN": Contender(lambda: checkpointer.save(1, model=model), checkpointer.wait),
            "copy": Contender(copy),
            "safetensors": Contender(safetensors),
            "DCP": Contender(dcp_async, dcp_wait),
        },
        "load": {
            "TorchMN": Contender(lambda: checkpointer.maybe_load(model=model)),
            "safetensors": Contender(lambda: model.load_state_dict(load_file(plain))),
            "torch.save": Contender(lambda: model.load_state_dict(torch.load(pickled, weights_only=True))),
            "DCP": Contender(dcp_load),
        },
    }


def take_turns(contenders: Mapping[str, Contender], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each contender in each turn; the first turn, which creates files and buffers, does not count.

    On a slow disk there are fewer turns.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    began = time.monotonic()
    for turn in range(options.rounds + 1):
        if turn > 1 and time.monotonic() - began > LONGEST:
            break
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            if options.ours_only and turn > 1 and name != "TorchMN":
                continue
            contender = contenders[name]
            start = time.process_time() if options.cpu else time.perf_counter()
            contender.run()
            seconds = (time.process_time() if options.cpu else time.perf_counter()) - start
            contender.after()
            if turn:
                times[name].append(seconds)
    return times


def counts(contender: Contender) -> dict[str, int]:
    """What one save needs."""
    gc.collect()
    with calls_of_fsync() as calls:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory("VmRSS")
        contender.run()
        contender.after()
        peak = memory("VmHWM")
    return {"fsyncs": len(calls), "memory, MB": round(peak - before)}


@contextmanager
def calls_of_fsync() -> Iterator[list[int]]:
    """A list that grows by one with each call of os.fsync."""
    calls: list[int] = []
    fsync = os.fsync
    os.fsync = lambda descriptor: calls.append(1) or fsync(descriptor)
    try:
        yield calls
    finally:
        os.fsync = fsync


def memory(field: str) -> float:
    """A field of /proc/self/status, in MB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time: for a machine that is busy")
    parser.add_argument("--sizes", nargs="+", choices=[*MEGABYTES, *TENSORS], default=[*MEGABYTES, *TENSORS])
    options = parser.parse_args()
    torch.manual_seed(0)
    comm = torchmn.create_communicator("solo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # for DCP's async_save
    results = Results("state")
    for size in options.sizes:
        count, numel = (MEGABYTES | TENSORS)[size]
        with tempfile.TemporaryDirectory(prefix="torchmn-bench-") as directory:
            operations = contenders(Tensors(count, numel), comm, Path(directory))
            if size == "400 MB":
                for name, contender in operations["save"].items():
                    results.count(f"save, {size}: {name}", counts(contender))
            for operation, each in operations.items():
                unit, amount = ("MB", count * 4) if size in MEGABYTES else ("tensors", count)
                work = None if operation == "pause" else Work(f"{operation}, {unit}", amount)
                results.add(f"{operation}, {size}", take_turns(each, options), work)
    dist.destroy_process_group()
    results.finish(options)


if __name__ == "__main__":
    main()
