"""Draws the pictures of docs/first-hour.md and docs/debugging.md: `make docs-pictures`.

It runs the commands of the first page. The report needs Chromium; without it, its picture stays as it is.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import torch
from matplotlib import pyplot
from page_blocks import commands_of, environment, files_of  # beside this file
from PIL import Image
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import torchmn

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS = 92


def draw_first_hour() -> None:
    page = (ROOT / "docs" / "first-hour.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files_of(page).items():
            (Path(folder) / name).write_text(text)
        (command,) = [line for line in commands_of(page) if line.startswith("torchmn train")]
        run = subprocess.run(
            command.split(),
            cwd=folder,
            env=environment() | {"COLUMNS": str(COLUMNS)},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        output = run.stdout.replace(f"{folder}/", "")
        draw_terminal(f"$ {command}\n{output.rstrip()}")
        photograph(Path(folder) / "run" / "report.html", PICTURES / "report.png")


def draw_terminal(text: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(text), highlight=False)
    console.save_svg(str(PICTURES / "terminal.svg"), title="Terminal", unique_id="terminal")


def photograph(page: Path, picture: Path, width: int = 1000, height: int = 1100) -> None:
    """Writes a picture of the top of an HTML page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"{picture.name} was not drawn: it needs one of {', '.join(BROWSERS)}")
        return
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [browser, *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)


def ranges_of_a_step(comm: torchmn.Communicator) -> list[tuple[str, float, float, int]]:
    """Returns name, begin and duration in milliseconds, and depth of the ranges of a training step."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 13 * 13, 10)),
    )
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    model = torchmn.parallelize(net, grid, mode="halopar", input_shape=(1, 64, 64))
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), grid, model=model)
    images = torchmn.data.scatter_regions((torch.rand(16, 1, 64, 64), torch.arange(16) % 10), grid)
    x, t = (torch.stack(column) for column in zip(*images, strict=True))
    events: Any = ()
    for _ in range(4):
        comm.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            with torch.profiler.record_function("forward"):
                loss = cross_entropy(model(x), t)
            with torch.profiler.record_function("backward"):
                loss.backward()
            with torch.profiler.record_function("optimizer.step()"):
                optimizer.step()
                optimizer.zero_grad()
        events = recorded.events()
    named = [
        event
        for event in events
        if event.name in ("forward", "backward", "optimizer.step()")
        or event.name.startswith(("torchmn::", "Optimizer.step"))
    ]
    start = min(event.time_range.start for event in named)
    found = []
    for event in named:
        begin, end = event.time_range.start, event.time_range.end
        around = [each for each in named if each.time_range.start <= begin <= end <= each.time_range.end]
        found.append((event.name, (begin - start) / 1000, (end - begin) / 1000, len(around) - 1))
    return found


def draw_profile() -> None:
    """Starts two ranks of this file; rank 0 draws the ranges of both."""
    command = [str(Path(sys.executable).parent / "torchmn"), "run", "-n", "2", __file__, "--profile"]
    subprocess.run(command, check=True, env=environment(), timeout=600)


def draw_profile_of_ranks() -> None:
    comm = torchmn.create_communicator()
    rows = comm.gather_obj(ranges_of_a_step(comm))
    if rows is None:
        return
    names = sorted({name for ranges in rows for name, *_ in ranges if "::" in name})
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "torchmn", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
    for rank, ranges in enumerate(rows):
        for name, begin, duration, depth in ranges:
            color = colors.get(name, "#d9dee5")
            row = rank * 3.6 + depth
            axes.barh(row, duration, left=begin, height=0.9, color=color, edgecolor="white", linewidth=0.4)
            if name not in colors:
                axes.text(begin + 0.05, row, name.partition("#")[2] or name, va="center", fontsize=8)
    axes.set_yticks([1, 4.6], ["rank 0", "rank 1"])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    figure.legend(patches, names, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(PICTURES / "profile.svg", metadata={"Date": None})


if __name__ == "__main__":
    if "--profile" in sys.argv:
        draw_profile_of_ranks()
    else:
        draw_profile()
        draw_first_hour()
