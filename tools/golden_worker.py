"""The ranks of tools/golden.py: trains small models for five steps and writes hashes of all numbers.

    python tools/golden_worker.py TRANSPORT SIZE DIRECTORY CELL...

Started once per transport and number of ranks, with `torchmn` of one of the two trees on PYTHONPATH. Rank r appends a
line of JSON to DIRECTORY/r for each cell: its name, and the hashes in the order in which they were taken. Only names
that `torchmn` exports are used, so that one file serves both trees.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_models import BATCH, MODELS, OPTIMIZERS, batch_of, filled, mlp, numbers
from torch import Tensor, nn

import torchmn

STEPS = 5


class Hashes:
    """The hashes of one rank in one cell, each with what it is of."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []

    def take(self, label: str, x: Tensor | None) -> None:
        if x is not None:
            plain = x.detach().contiguous()
            values = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            text = f"{plain.dtype} {tuple(plain.shape)} ".encode()
            self.taken.append((label, hashlib.blake2b(text + values, digest_size=8).hexdigest()))

    def take_all(self, label: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        for name, x in tensors:
            self.take(f"{label} {name}", x)

    def take_model(self, step: str, model: nn.Module) -> None:
        self.take_all(f"{step}: gradient after the step,", ((name, p.grad) for name, p in model.named_parameters()))
        self.take_all(f"{step}: parameter", model.named_parameters())
        self.take_all(f"{step}: buffer", model.named_buffers())


class World:
    """This rank's communicator, and what the transport means for random numbers."""

    def __init__(self, comm: Any, transport: str):
        self.comm, self.transport, self.hashes = comm, transport, Hashes()

    def seed(self, step: int) -> None:
        """The same random state on every rank. Threads have one generator together, which must be seeded once."""
        if self.transport != "threads" or self.comm.rank == 0:
            torch.manual_seed(step)
        self.comm.barrier()


def trained(world: World, mode: str, name: str, rule: str, tiles: bool = False, **sizes: int) -> None:
    """A model that went through `parallelize`, on a grid of these sizes (-1: all ranks)."""
    make, shape, dense = MODELS[name]
    comm, hashes = world.comm, world.hashes
    axes: dict[str, Any] = {axis: comm.size if size < 0 else size for axis, size in sizes.items()}
    grid = torchmn.ProcessGrid(comm, **axes)
    model = torchmn.parallelize(filled(make()), grid, mode, input_shape=shape)
    step_rule, options, limit = OPTIMIZERS[rule]
    optimizer = torchmn.create_multi_node_optimizer(step_rule(model.parameters()), grid, model=model, **options)
    for step in range(STEPS):
        x, y = batch_of(shape, dense, step)
        if sizes.get("data"):
            x, y = (part.tensor_split(grid.sizes["data"])[grid.place["data"]] for part in (x, y))
        if tiles:
            x = x.tensor_split(comm.size, dim=2)[comm.rank].contiguous()
        world.seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        hashes.take(f"step {step}: loss", loss)
        (optimizer.weigh(loss, len(y)) if sizes.get("data") else loss).backward()
        if not options:  # else gradients may be on their way already
            local = ((key, p.grad) for key, p in model.named_parameters())
            hashes.take_all(f"step {step}: gradient after backward,", local)
        if limit is not None:
            optimizer.synchronize()
            hashes.take(f"step {step}: norm", torchmn.clip_grad_norm_(model, limit))
        optimizer.step()
        if "double_buffering" not in options:
            hashes.take_model(f"step {step}", model)
    if "double_buffering" in options:
        optimizer.flush()  # type: ignore[attr-defined]
    hashes.take_model("end", model)
    hashes.take_all("end: whole state,", torchmn.full_state_dict(model).items())


def copies(world: World, name: str, rule: str) -> None:
    """An ordinary model and our optimizer alone, as most scripts of ChainerMN's users; unequal batches by weight."""
    make, shape, dense = MODELS[name]
    comm, hashes = world.comm, world.hashes
    model = filled(make())
    if name == "norms":
        model = torchmn.create_mnbn_model(model, comm)
    step_rule, options, limit = OPTIMIZERS[rule]
    optimizer = torchmn.create_multi_node_optimizer(step_rule(model.parameters()), comm, model=model, **options)
    for step in range(STEPS):
        x, y = (part.tensor_split(comm.size)[comm.rank] for part in batch_of(shape, dense, step))
        world.seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        hashes.take(f"step {step}: loss", loss)
        # Where gradients leave during backward, the loss is weighed, not the gradients.
        weighs_loss = name == "norms" or "overlap" in options
        (optimizer.weigh(loss, len(y)) if weighs_loss else loss).backward()
        if limit is not None:
            optimizer.synchronize(weight=len(y))
            hashes.take(f"step {step}: norm", nn.utils.clip_grad_norm_(model.parameters(), limit))
        weight = None if weighs_loss or limit is not None else len(y)
        optimizer.step(weight=weight)
        if "double_buffering" not in options:
            hashes.take_model(f"step {step}", model)
    if "double_buffering" in options:
        optimizer.flush()  # type: ignore[attr-defined]
    hashes.take_model("end", model)


def line(comm: Any, microbatches: int) -> Any:
    """A model in stages, one after the other."""
    layers = [nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)]
    return torchmn.MultiNodeChainList.from_sequential(filled(nn.Sequential(*layers)), comm, microbatches=microbatches)  # type: ignore[arg-type]


class Sum(nn.Module):
    """The sum of what several ranks sent."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, *parts: Tensor) -> Tensor:
        return self.last(torch.stack(parts).sum(0))


def fan(comm: Any, microbatches: int) -> Any:
    """Rank 0 sends to all others and adds up what they answer; the last rank takes the loss of it."""
    chain = torchmn.MultiNodeChainList(comm, microbatches)
    others = list(range(1, comm.size))
    if comm.rank == 0:
        chain.add_link(filled(nn.Linear(5, 4)), None, others)
        chain.add_link(filled(Sum()), others, comm.size - 1)
    else:
        chain.add_link(filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh())), 0, 0)
    if comm.rank == comm.size - 1:
        chain.add_link(nn.Identity(), 0, None)
    return chain


def chained(world: World, make: Callable[[Any, int], Any], microbatches: int, rule: str) -> None:
    """A MultiNodeChainList with an optimizer of each rank's own."""
    comm, hashes = world.comm, world.hashes
    chain = make(comm, microbatches)
    step_rule, _, limit = OPTIMIZERS[rule]
    parameters = list(chain.parameters())
    optimizer = step_rule(parameters) if parameters else None
    for step in range(STEPS):
        x, target = numbers(BATCH, 5, seed=step), numbers(BATCH, 3, seed=100 + step)
        chain.zero_grad()
        y = chain(x) if comm.rank == 0 else chain()
        loss = F.mse_loss(y, target) if comm.rank == comm.size - 1 else y
        hashes.take(f"step {step}: loss or delegate", loss)
        loss.backward()
        if limit is not None:
            hashes.take(f"step {step}: norm", torchmn.clip_grad_norm_(chain, limit))
        if optimizer is not None:
            optimizer.step()
        hashes.take_model(f"step {step}", chain)


def functions(world: World) -> None:
    """Each differentiable function, with the gradients of its inputs."""
    comm, hashes, f = world.comm, world.hashes, torchmn.functions
    rank, size = comm.rank, comm.size
    for step in range(STEPS):
        x = numbers(3 + step, 5, seed=10 * step + rank).requires_grad_()
        several = [numbers(2 + n, 3, seed=step + 7 * rank + n).requires_grad_() for n in range(size)]
        even = [numbers(4, 3, seed=step + 7 * rank + n).requires_grad_() for n in range(size)]
        results: dict[str, Any] = {
            "allreduce": f.allreduce(comm, x),
            "mean": f.allreduce(comm, x, op="mean"),
            "allgather": f.allgather(comm, x),
            "alltoall": f.alltoall(comm, several),
            "reduce_scatter": f.reduce_scatter(comm, even),
            "bcast": f.bcast(comm, x if rank == 1 else None, root=1),
            "gather": f.gather(comm, x, root=0),
            "scatter": f.scatter(comm, several if rank == 0 else None, root=0),
        }
        delegate = f.send(x, comm, (rank + 1) % size, tag=3)
        results["ring"] = f.recv(comm, (rank - 1) % size, delegate_variable=delegate, tag=3)
        loss = torch.zeros(())
        for place, (name, result) in enumerate(results.items()):
            tensors = [result] if isinstance(result, Tensor) else list(result or ())
            for n, y in enumerate(tensors):
                hashes.take(f"step {step}: {name} {n}", y)
                loss = loss + (y * numbers(*y.shape, seed=50 + place)).sum()
        loss.backward()
        inputs = {
            "x": x,
            **{f"several {n}": y for n, y in enumerate(several)},
            **{f"even {n}": y for n, y in enumerate(even)},
        }
        hashes.take_all(f"step {step}: gradient of", ((name, y.grad) for name, y in inputs.items()))


def collectives(world: World) -> None:
    """Operations of the communicator itself: dtypes, reductions, and sizes that travel in different ways."""
    comm, hashes = world.comm, world.hashes
    rank, size = comm.rank, comm.size
    for elements in (0, 1, 255, 5000, 300_001, 2_000_003):
        x = numbers(elements, seed=rank)
        hashes.take(f"allreduce sum, {elements}", comm.allreduce(x))
        hashes.take(f"allreduce mean in place, {elements}", comm.allreduce(x.clone(), "mean", in_place=True))
        hashes.take(f"bcast, {elements}", comm.bcast(x, root=size - 1))
        hashes.take_all(f"allgather, {elements}", ((str(n), y) for n, y in enumerate(comm.allgather(x))))
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        x = numbers(700, seed=rank).mul(4).to(dtype)
        for op in ("sum", "prod") if dtype.is_complex else ("sum", "max", "min", "prod"):
            hashes.take(f"allreduce {op}, {dtype}", comm.allreduce(x, op))
        pieces = [x[n : 100 + 3 * n] for n in range(size)]
        hashes.take_all(f"alltoall, {dtype}", ((str(n), y) for n, y in enumerate(comm.alltoall(pieces))))
        hashes.take(f"reduce_scatter, {dtype}", comm.reduce_scatter([x[:90] + n for n in range(size)]))
    model = filled(mlp())
    for place, p in enumerate(model.parameters()):
        p.grad = numbers(*p.shape, seed=rank + 10 * place)
    comm.multi_node_mean_grad(model)
    hashes.take_model("multi_node_mean_grad", model)


PROCESSES = ("mpi", "gloo")
EVERYWHERE = (*PROCESSES, "threads")
Cell = tuple[Callable[[World], None], tuple[int, ...], tuple[str, ...]]


def cells() -> dict[str, Cell]:
    """What each cell runs, on how many ranks, and on which transports."""
    found: dict[str, Cell] = {
        "functions": (functions, (2, 3), EVERYWHERE),
        "collectives": (collectives, (2, 3), EVERYWHERE),
    }

    def add(name: str, run: Callable[[World], None], sizes=(2, 3), transports=EVERYWHERE) -> None:
        found[name] = run, sizes, transports

    for rule in OPTIMIZERS:
        add(f"datapar/mlp/{rule}", partial(trained, mode="datapar", name="mlp", rule=rule, data=-1))
    for rule in ("momentum", "overlap", "double_buffering", "clipping"):
        add(f"copies/mlp/{rule}", partial(copies, name="mlp", rule=rule))
    for rule in ("sgd", "overlap", "float16", "clipping"):
        add(f"modelpar/mlp/{rule}", partial(trained, mode="modelpar", name="mlp", rule=rule, width=-1))
    for rule in ("sgd", "double_buffering", "bfloat16", "clipping"):
        add(f"halopar/convolutions/{rule}", partial(trained, mode="halopar", name="convolutions", rule=rule, height=-1))
    add("copies/norms/sgd", partial(copies, name="norms", rule="sgd"))
    # Ranks that are threads draw from one generator: which gets which numbers depends on who comes first.
    add("copies/dropout/sgd", partial(copies, name="dropout", rule="sgd"), transports=PROCESSES)
    for name in ("norms", "dropout", "vgg"):
        add(f"datapar/{name}/adam", partial(trained, mode="datapar", name=name, rule="adam", data=-1))
    for name in ("norms", "dropout", "vgg", "unet"):
        add(f"modelpar/{name}/momentum", partial(trained, mode="modelpar", name=name, rule="momentum", width=-1))
    for name in ("vgg", "unet"):
        for axis in ("height", "width"):
            add(f"halopar/{name}/{axis}", partial(trained, mode="halopar", name=name, rule="adam", **{axis: -1}))
    add("halopar/vgg/tiles", partial(trained, mode="halopar", name="vgg", rule="clipping", tiles=True, height=-1))
    add("halopar/vgg/grid", partial(trained, mode="halopar", name="vgg", rule="adam", height=2, width=2), sizes=(4,))
    for name in ("convolutions", "vgg", "unet"):
        # Overlap is refused where ranks hold slices, as of the Linear behind the tiles.
        for rule in ("momentum", "clipping", "overlap" if name == "unet" else "bfloat16"):
            run = partial(trained, mode="halodatapar", name=name, rule=rule, data=2, height=2)
            add(f"halodatapar/{name}/{rule}", run, sizes=(4,))
    for make in (line, fan):
        for microbatches in (1, 3):
            for rule in ("adam", "clipping"):
                run = partial(chained, make=make, microbatches=microbatches, rule=rule)
                add(f"chain/{make.__name__}/{microbatches} microbatches/{rule}", run)
    return found


def main() -> None:
    transport, size, directory, *names = sys.argv[1:]
    torch.set_num_threads(1)
    comm = None if transport == "threads" else torchmn.create_communicator(transport)
    for name in names:
        run = cells()[name][0]

        def one_rank(comm: Any, run: Callable[[World], None] = run, name: str = name) -> None:
            world, error = World(comm, transport), None
            try:
                run(world)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
                raise
            finally:
                with Path(directory, str(comm.rank)).open("a") as file:
                    line = {"cell": name, "error": error, "library": torchmn.__file__, "hashes": world.hashes.taken}
                    print(json.dumps(line), file=file)

        if comm is not None:
            one_rank(comm)
        else:
            try:
                torchmn.run_threads(one_rank, int(size), timeout=60)
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
