"""Run all benchmarks one after the other, and write results.json, RESULTS.md and pictures/ from this run.

    make bench-all
    .venv/bin/python benchmarks/run_all.py --quick --only halo start_up --out /tmp/trial

Takes about 25 minutes on 2 cores; nothing else should run on the machine. The benchmark of hosts needs root. All files
are rewritten after each benchmark. A benchmark that fails is listed as failed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from results import Results, ratio_text

HERE = Path(__file__).resolve().parent
TIME_LIMIT = 600  # seconds per benchmark


class Section(NamedTuple):
    """One section of the page.

    `answer` may contain {case|contender}, which becomes the ratio of that contender. `rows` is a pattern: the cases
    that the page's table shows; the picture shows all.
    """

    question: str
    command: str
    answer: str
    rows: str = ""


SECTIONS = {
    "communicators": Section(
        "How fast are all-reduce and other communication?",
        "mpiexec -n 2 python benchmarks/communicators.py",
        "An all-reduce of 1 MB in place takes {allreduce in place, 1 MB|raw mpi4py} times as long with raw mpi4py and "
        "{allreduce in place, 1 MB|gloo} times with gloo; of 1 KB, {allreduce in place, 1 KB|raw mpi4py} and "
        "{allreduce in place, 1 KB|gloo} times.",
        r" (1 KB|1 MB|16 MB|7 MB)$",
    ),
    "differentiable_send": Section(
        "What does it cost to differentiate through a message?",
        "mpiexec -n 2 python benchmarks/differentiable_send.py",
        "A tensor of 1 KB and its gradient take {1 KB|hand-written} times as long with hand-written functions of "
        "autograd; autograd alone, without any message, takes {1 KB|autograd only} times as long.",
    ),
    "hosts": Section(
        "How fast is an all-reduce between hosts?",
        "python benchmarks/hosts.py",
        "Between two hosts with links of 100 Mbit/s, the bytes that each must send take "
        "{20 MB, 2 hosts, 100 Mbit/s|limit} of the time of TorchMN's all-reduce of 20 MB; MPICH's takes "
        "{20 MB, 2 hosts, 100 Mbit/s|raw mpi4py} times as long, and {20 MB, 3 hosts, 100 Mbit/s|raw mpi4py} times "
        "between three hosts. Hosts are network namespaces of one machine.",
    ),
    "data_parallel": Section(
        "Is data parallel training faster than DDP?",
        "mpiexec -n 2 python benchmarks/data_parallel.py",
        "With Adam, DDP takes {MLP 784-1000-1000-10, Adam|DDP} times as long for the MLP and "
        "{conv 20-50, fc 500, Adam|DDP} times for the convnet with 20 and 50 channels, for which two ranks without "
        "communication take {conv 20-50, fc 500, Adam|no communication} times as long.",
    ),
    "overlap": Section(
        "Does it help to send gradients during backward?",
        "mpiexec -n 2 python benchmarks/data_parallel.py --overlap",
        "With two ranks on two cores, steps of the MLP take {MLP 784-1000-1000-10, MPI|TorchMN, overlap=True} times as "
        "long with `overlap=True` over MPI, and {MLP 784-1000-1000-10, gloo|TorchMN, overlap=True} times over gloo.",
    ),
    "growth_optimizer": Section(
        "What does averaging add to a step, with more and more tensors?",
        "mpiexec -n 2 python benchmarks/growth_optimizer.py",
        "DDP adds {10 tensors|DDP} times as much to a step with 10 small tensors, {100 tensors|DDP} times with 100, "
        "{1,000 tensors|DDP} times with 1,000 and {5,000 tensors|DDP} times with 5,000; a flat all-reduce by hand "
        "{10 tensors|MPI by hand}, {100 tensors|MPI by hand}, {1,000 tensors|MPI by hand} and "
        "{5,000 tensors|MPI by hand} times.",
    ),
    "halo": Section(
        "How much faster is an image that is cut over two ranks?",
        "mpiexec -n 2 python benchmarks/halo.py",
        "One rank takes {512x512|one rank} times as long for images of 512x512 and {128x128|one rank} times for "
        "128x128; the same tiles without exchange take {512x512|no exchange} and {128x128|no exchange} times as long.",
    ),
    "growth_parallelize": Section(
        "What does a cut image cost, with more and more layers, and with new shapes?",
        "mpiexec -n 2 python benchmarks/growth_parallelize.py",
        "The layers alone, on half of the image, take {10 convolutions|tile alone} times as long for 10 convolutions "
        "and {500 convolutions|tile alone} times for 500, and those of a narrow ResNet-50 "
        "{ResNet-50, evaluation|tile alone} times in evaluation and {ResNet-50, training|tile alone} in training. "
        "A later forward takes {a new image size|later} times as long as the first one of a new image size, and "
        "{a new batch size|later} times as long as that of a new batch size.",
    ),
    "tensor_parallel": Section(
        "How much faster is a wide MLP that is cut over two ranks?",
        "mpiexec -n 2 python benchmarks/tensor_parallel.py",
        "One rank takes {32 samples|one rank} times as long for 32 samples and {128 samples|one rank} times for 128, "
        "and holds twice as many parameters.",
    ),
    "pipeline": Section(
        "How good is the pipeline?",
        "mpiexec -n 2 python benchmarks/pipeline.py",
        "With 8 micro-batches torch's GPipe schedule takes {8 micro-batches|torch GPipe} times as long, "
        "TorchMN without pipelining {8 micro-batches|sequential} times, and a pipeline with free communication "
        "{8 micro-batches|ideal} times.",
    ),
    "sparse_autoencoder": Section(
        "How much faster is the sparse autoencoder on two ranks?",
        "mpiexec -n 2 python benchmarks/sparse_autoencoder.py",
        "One rank takes {fine-tuning|one rank} times as long for a step of fine-tuning; the same tiles without "
        "messages take {fine-tuning|no messages} times as long.",
    ),
    "local_filters": Section(
        "How fast are local filters in one process?",
        "mpiexec -n 1 python benchmarks/local_filters.py",
        "In the second layer, a loop over positions takes {8 x 23², 3² kernel, 100|loop} times as long for 100 images, "
        "and {8 x 23², 3² kernel, 1|loop} times for one.",
    ),
    "checkpoint": Section(
        "What does a checkpoint cost?",
        "python benchmarks/checkpoint.py",
        "Until a checkpoint of 400 MB is complete on disk, safetensors takes {save, 400 MB|safetensors} times as long, "
        "and until one of 10,000 small tensors is, {save, 10,000 tensors|safetensors} times. Training pauses for a "
        "copy of the state: one by hand takes {pause, 400 MB|copy} times as long for 400 MB. To load, with all "
        "checksums, safetensors takes {load, 400 MB|safetensors} and {load, 10,000 tensors|safetensors} times as long, "
        "without any.",
    ),
    "data": Section(
        "What does it cost to send data from one rank to the others?",
        "mpiexec -n 2 python benchmarks/data.py",
        "To scatter 100,000 pairs of a tensor and a number, mpi4py needs {scatter 100,000 items|mpi4py} times as much "
        "CPU as `scatter_dataset`. For a batch that one rank reads for all, a DataLoader and one broadcast by hand "
        "need {a batch of 64 images|one broadcast} times as much, and the DataLoader alone "
        "{a batch of 64 images|DataLoader} times.",
    ),
    "experiment_rate": Section(
        "How fast is `torchmn train`, compared with a loop written by hand?",
        "mpiexec -n 2 python benchmarks/experiment_rate.py",
        "On one rank, a step of 300 samples takes {300 samples, 1 rank|by hand} times as long in a loop by hand, and "
        "{300 samples, 1 rank|by hand, shuffled} times if it shuffles; on two ranks, {300 samples, 2 ranks|by hand} "
        "and {300 samples, 2 ranks|by hand, shuffled} times.",
    ),
    "peak_memory": Section(
        "How much memory does a rank need?",
        "python benchmarks/peak_memory.py",
        "DDP needs {MLP 784-1000-1000-10, Adam|DDP} times as much for the MLP with Adam, and one rank needs "
        "{image 512x512|one rank} times as much for an image of 512x512 that two ranks share.",
    ),
    "start_up": Section(
        "How long does a start take?",
        "python benchmarks/start_up.py",
        "To import torch and use it takes {import and use|torch} times as long, and a job of two ranks under `mpiexec` "
        "that creates a gloo process group instead of a communicator {2 ranks, mpiexec|torch} times.",
    ),
}

HEADER = """# Results

{stamp}TorchMN compared with alternatives, on two ranks of one machine with one thread each. The column TorchMN is a
median. **Other cells are the value of that contender divided by that of TorchMN: above 1, TorchMN is faster, or needs
less.** Contenders take turns in one run; a cell is the median over turns, and a turn takes as long as its slowest rank.
Bars in pictures are quartiles. The first lines of each script explain its columns;
[performance](../docs/performance.md) explains the limits.

{date}, TorchMN commit {commit}, {environment}. Generated by `{command}`.
"""
QUICK = "> **Trial run with one turn per contender: these numbers are rough.** `make bench-all` replaces them.\n\n"

WIDE_TICKS = [factor * 10.0**power for power in range(-3, 4) for factor in (1, 2, 5)]
NARROW_TICKS = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4]

Run = dict[str, Any]
"""The content of results.json: date, commit, command, whether it was quick, and `benchmarks`, by name."""


def run_benchmark(section: Section, quick: bool) -> dict[str, Any]:
    """Run one script; the result has `results`, the content of its JSON file, or `error`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchmn-bench-") as directory:
        file = Path(directory, "results.json")
        words = [word.replace("benchmarks", str(HERE)) for word in section.command.split()]
        paths = {"python": sys.executable, "mpiexec": str(Path(sys.executable).with_name("mpiexec"))}
        command = [paths.get(word, word) for word in words] + ["--json", str(file)] + ["--rounds", "1"] * quick
        error = run_command(command)
        outcome = {"error": error} if error else {"results": json.loads(file.read_text())}
    return {"seconds": round(time.monotonic() - began), **outcome}


def run_command(command: list[str]) -> str:
    """Run a command; returns the end of its output if it fails, else an empty string."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryFile("w+") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(command, env=environment, cwd=HERE.parent, start_new_session=True, **streams)
        try:
            status = job.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return f"did not end within {TIME_LIMIT} s"
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # mpiexec and torchrun then end their ranks
                job.wait()
        output.seek(0)
        return f"exit status {status}: {output.read().strip()[-600:]}" if status else ""


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "../torchmn", "*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with local changes" if changed else "")


def section_text(name: str, benchmark: dict[str, Any]) -> str:
    """One section of the page."""
    section = SECTIONS[name]
    lines = [f"\n## {section.question}\n"]
    if "error" in benchmark:
        lines += [f"**Failed**: `{section.command}`\n", "```text", benchmark["error"], "```"]
        return "\n".join(lines) + "\n"
    results = Results.of_json(benchmark["results"])

    def ratio(match: re.Match[str]) -> str:
        return ratio_text(results.ratios(*match[1].split("|")))

    lines += [re.sub(r"\{(.*?)\}", ratio, section.answer) + "\n", results.table(section.rows)]
    if results.counts:
        lines += ["\nCounts, which do not depend on the machine:\n", results.count_table()]
    shown = "Cost over work, with exponents" if results.work else "Ratios of all contenders"
    lines += [f"\n![{shown}](pictures/{name}.png)\n", f"`{section.command}`, {benchmark['seconds']} s"]
    return "\n".join(lines) + "\n"


def page(run: Run) -> str:
    """RESULTS.md."""
    benchmarks: dict[str, dict[str, Any]] = run["benchmarks"]
    versions = [item for each in benchmarks.values() for item in each.get("results", {}).get("environment", ())]
    header = HEADER.format(stamp=QUICK if run["quick"] else "", environment=", ".join(dict.fromkeys(versions)), **run)
    return header + "".join(section_text(name, each) for name, each in benchmarks.items())


def draw(results: Results, file: Path) -> None:
    """A picture with a row per case and a dot per contender, at its ratio."""
    cases = list(results.cases)
    figure = Figure(figsize=(8, 1.2 + 0.27 * len(cases)), layout="constrained")
    axes = figure.subplots()
    contenders = list(dict.fromkeys(name for each in results.cases.values() for name in list(each)[1:]))
    for place, contender in enumerate(contenders):
        points = []
        for row, case in enumerate(cases):
            if contender in results.cases[case]:
                ratios = results.ratios(case, contender)
                low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
                shift = 0.5 * ((place + 0.5) / len(contenders) - 0.5)
                points.append((middle, row + shift, middle - low, high - middle))
        x, y, left, right = zip(*points, strict=True)
        axes.errorbar(x, y, xerr=(left, right), fmt="o", markersize=4, linewidth=1, label=contender)
    for row in range(1, len(cases), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in (WIDE_TICKS if high > 5 * low else NARROW_TICKS) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("divided by TorchMN: above 1, TorchMN is faster or needs less")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_growth(results: Results, file: Path) -> None:
    """A picture with a panel per series: the cost of each contender over the work, both axes logarithmic."""
    series = results.series()
    figure = Figure(figsize=(4.5 * len(series) + 1, 4.5), layout="constrained")
    for axes, (name, cases) in zip(figure.subplots(1, len(series), squeeze=False)[0], series.items(), strict=True):
        for contender in dict.fromkeys(contender for case in cases for contender in results.cases[case]):
            present = [case for case in cases if contender in results.cases[case]]
            amounts = [results.work[case].amount for case in present]
            values = [median(results.cases[case][contender]) for case in present]
            exponent = results.exponent(name, contender)
            label = contender if exponent is None else f"{contender}: {exponent:.2f}"
            axes.plot(amounts, values, "o-", markersize=4, linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set_xlabel(name)
        axes.set_ylabel("seconds" if results.unit == "s" else results.unit)
        axes.legend(title="contender: exponent", fontsize="small")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def write(run: Run, out: Path) -> None:
    """All files of the run."""
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    text = json.dumps(run, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^][{}]*\]", lambda match: " ".join(match[0].split()), text)  # one line per list
    (out / "results.json").write_text(text + "\n")
    (out / "RESULTS.md").write_text(page(run))
    for name, benchmark in run["benchmarks"].items():
        if "results" in benchmark:
            results = Results.of_json(benchmark["results"])
            (draw_growth if results.work else draw)(results, out / "pictures" / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one turn per contender, for a trial")
    parser.add_argument("--out", type=Path, default=HERE, help="where the files are written (default: benchmarks)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the running benchmark is ended, too
    command = "make bench-all" if sys.argv[1:] == [] else f"python benchmarks/run_all.py {' '.join(sys.argv[1:])}"
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    run: Run = {"date": date, "commit": commit(), "command": command, "quick": options.quick, "benchmarks": {}}
    for name in options.only:
        print(f"{name} ...", end="", flush=True)
        outcome = run_benchmark(SECTIONS[name], options.quick)
        print(f" {'failed' if 'error' in outcome else 'done'}, {outcome['seconds']} s", flush=True)
        run["benchmarks"][name] = outcome
        write(run, options.out)
    print(f"wrote {options.out / 'RESULTS.md'}")
    sys.exit(any("error" in outcome for outcome in run["benchmarks"].values()))


if __name__ == "__main__":
    main()
