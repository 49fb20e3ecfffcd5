"""All-reduce between hosts with slow links, as a share of what the links can carry.

    python benchmarks/hosts.py                      # as root, on Linux
    python benchmarks/hosts.py --mpiexec .openmpi/bin/mpirun

Hosts are network namespaces of this machine; `tc tbf` limits their links. `limit` is the time of the bytes that any
algorithm must send through a host's link in each direction, 2 (H - 1) / H times the buffer for H hosts, at the nominal
rate; `raw mpi4py` is the algorithm that the MPI library chooses, and gloo torch.distributed. Counts are the bytes that
the first host has sent per all-reduce, headers of TCP/IP and resent packets included, in percent of that minimum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from results import Results, Work, arguments

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "1 MB, 2 hosts, 100 Mbit/s": (1, [1, 1], 100),
    "5 MB, 2 hosts, 100 Mbit/s": (5, [1, 1], 100),
    "20 MB, 2 hosts, 100 Mbit/s": (20, [1, 1], 100),
    "20 MB, 3 hosts, 100 Mbit/s": (20, [1, 1, 1], 100),
    "20 MB, 2 hosts of 2 ranks, 100 Mbit/s": (20, [2, 2], 100),
    "20 MB, 2 hosts, 1 Gbit/s": (20, [1, 1], 1000),
    "20 MB, 3 hosts, 1 Gbit/s": (20, [1, 1, 1], 1000),
}
SERIES = list(CASES)[:3]
"""The cases of growing work."""
CONTENDERS = ("TorchMN", "raw mpi4py", "gloo")


def rank(options: argparse.Namespace) -> None:
    """Measures on one rank; rank 0 prints a JSON object of seconds and bytes for each contender."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torchmn.init_process_group(comm, "gloo")
    x = torch.ones(options.mb << 18)
    calls: dict[str, Callable[[], object]] = {
        "TorchMN": lambda: comm.allreduce(x, in_place=True),
        "raw mpi4py": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy()),
        "gloo": lambda: dist.all_reduce(x),
    }
    measured: dict[str, dict[str, list[float]]] = {name: {"s": [], "bytes": []} for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            if options.ours_only and name != "TorchMN":
                continue
            x.fill_(1.0)
            comm.barrier()
            start, sent = time.perf_counter(), bytes_sent()
            call()
            comm.barrier()
            if turn:
                measured[name]["s"].append(time.perf_counter() - start)
                measured[name]["bytes"].append(bytes_sent() - sent)
            assert x[-1] == comm.size
    dist.destroy_process_group()
    if comm.rank == 0:
        print("MEASURED" + json.dumps(measured), flush=True)


def bytes_sent() -> int:
    """The bytes that this host has sent through its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise SystemExit("this host has no eth0")


def measure(options: argparse.Namespace, mb: int, ranks: list[int], megabits: int) -> dict[str, dict[str, list[float]]]:
    sys.path.insert(0, str(ROOT))
    from tests._worlds.hosts import Hosts

    command = [sys.executable, __file__, "--rank", "--rounds", str(options.rounds), "--mb", str(mb)]
    command += ["--ours-only"] * options.ours_only
    with Hosts({f"host{number}": count for number, count in enumerate(ranks)}, rate=f"{megabits}mbit") as hosts:
        (line,) = hosts.commands([str(options.mpiexec)], command)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if options.mpiexec.name == "mpirun":
            environment |= {"MPI4PY_LIBMPI": str(options.mpiexec.resolve().parent.parent / "lib" / "libmpi.so.40")}
        output = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    for text in output.stdout.splitlines():
        if "MEASURED" in text:
            return json.loads(text.partition("MEASURED")[2])
    raise SystemExit(f"{output.stdout}{output.stderr}")


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    parser.add_argument("--mpiexec", type=lambda name: Path(name).absolute(), default=mpiexec)
    parser.add_argument("--mb", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    times = Results("all-reduce")
    for case, (mb, ranks, megabits) in CASES.items():
        if options.only not in case:
            continue
        measured = measure(options, mb, ranks, megabits)
        minimum = 2 * (len(ranks) - 1) / len(ranks) * (mb << 20)
        seconds = {name: each["s"] for name, each in measured.items() if each["s"]}
        seconds["limit"] = [minimum * 8 / (megabits * 1e6)] * len(seconds["TorchMN"])
        times.add(case, seconds, Work("MB", mb) if case in SERIES else None)
        sent = {name: median(each["bytes"]) / minimum for name, each in measured.items() if each["bytes"]}
        times.count(case, {f"{name}, % of the minimum": round(100 * share) for name, share in sent.items()})
    times.finish(options)


if __name__ == "__main__":
    main()
