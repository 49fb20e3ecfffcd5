"""The time until a program can communicate: TorchMN beside plain torch with gloo.

    python benchmarks/start_up.py

`import` is `python -c "import torchmn"`, which loads torch at the first use of a name, and the same with torch. `import
and use` also creates a communicator of one process, and a tensor. Other cases are the whole job, from the start of the
launcher to its end, of two ranks that import the library and create a communicator or a process group.
"""

from __future__ import annotations

import os
import subprocess
import time

from baseline_process import free_port
from peak_memory import MPIEXEC, TORCHRUN
from results import Results, arguments

TORCHMN = "import torchmn; torchmn.create_communicator()"
TORCH = (
    "import os, torch.distributed as dist; dist.init_process_group('gloo', rank={}, world_size=2); "
    "dist.barrier(); dist.destroy_process_group()"  # without a barrier one rank may leave while the other connects
)
PYTHON = MPIEXEC[-1:]
CASES = {
    "import": (PYTHON, {"TorchMN": "import torchmn", "torch": "import torch"}),
    "import and use": (PYTHON, {"TorchMN": TORCHMN, "torch": "import torch; torch.zeros(1)"}),
    "2 ranks, mpiexec": (MPIEXEC, {"TorchMN": TORCHMN, "torch": TORCH.format("int(os.environ['PMI_RANK'])")}),
    "2 ranks, torchrun": (
        [*TORCHRUN, "--no-python", *PYTHON],
        {"TorchMN": TORCHMN, "torch": TORCH.format("int(os.environ['RANK'])")},
    ),
}


def seconds_of(command: list[str]) -> float:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | place | {"OMP_NUM_THREADS": "1"}, check=True)
    return time.perf_counter() - start


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    results = Results("start")
    for case, (launcher, programs) in CASES.items():
        times: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(options.rounds + 1):
            for name, program in programs.items():
                seconds = seconds_of([*launcher, "-c", program])
                if turn:  # the first turn reads files from the disk
                    times[name].append(seconds)
        results.add(case, times)
    results.finish(options)


if __name__ == "__main__":
    main()
