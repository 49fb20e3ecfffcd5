"""create_communicator: the right transport for the way this process was started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.launchers import environment
from torchmn.communicators.launchers.allocator import keep_freed_memory
from torchmn.communicators.launchers.topology import Machine, names_of_hosts
from torchmn.communicators.transports.group import Group, Settings
from torchmn.communicators.transports.mpi_library import small_unused_buffers
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.communicators.watchdog import process_hooks
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.communicators.watchdog.waits import Watch
from torchmn.context import here, process
from torchmn.errors import ArgumentError, LaunchError, MismatchError, nearest
from torchmn.optional import optional_module

# What a user may ask for -> the transport. The second group is ChainerMN's names.
NAMES = {
    "auto": "auto",
    "mpi": "mpi",
    "gloo": "gloo",
    "nccl": "nccl",
    "threads": "threads",
    "solo": "solo",
    "naive": "auto",
    "flat": "auto",
    **dict.fromkeys(("pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"), "nccl"),
}
_KEYWORDS = ("mpi_comm", "device", "grad_dtype", "timeout")


@torch.inference_mode(False)  # its buffers will be used outside of that mode, too
def create_communicator(name: str = "auto", **options: Any) -> Communicator:
    """The communicator of all ranks that were started together. Every rank must call it.

    name: `auto` asks the launcher's environment variables: MPI under mpiexec, srun and other MPI launchers, nccl or
    gloo under torchrun, `solo` where there is no launcher. Explicit: mpi, nccl, gloo, threads, solo. ChainerMN's
    `naive` and `flat` mean auto, its other names nccl.
    A world of one in a process that a launcher started as one of several is refused, also an explicit `solo`: for a
    communicator of this rank alone use `comm.split(comm.rank)`, or `mpi_comm=MPI.COMM_SELF`.
    Inside of `run_threads`, `auto` without a launcher and `threads` are the ranks of that, under any launcher: their
    number stands in the program.
    mpi_comm: an mpi4py communicator to use instead of MPI.COMM_WORLD; `auto` means mpi then.
    device: where this rank computes; by default its GPU (by intra_rank) if there is one, else the CPU.
    grad_dtype: torch.float16 or torch.bfloat16 to send gradients compressed; they are summed in float32.
    timeout: seconds that a wait may last before the job is ended with a table; default `TORCHMN_TIMEOUT` or 300.
    """
    for keyword in options:
        if keyword not in _KEYWORDS:
            raise UnknownKeyword(f"create_communicator: unknown keyword {keyword!r}. {nearest(keyword, _KEYWORDS)}")
    if not isinstance(name, str) or name not in NAMES:
        raise ArgumentError(f"create_communicator: unknown communicator {name!r}. {nearest(name, NAMES)}")
    settings = _settings(options)
    keep_freed_memory()
    launch = environment.detect()
    transport = NAMES[name]
    world = here.communicator
    if world is not None and (transport == "threads" or (transport == "auto" and launch.transport == "solo")):
        return _placed(_among_threads(world, settings, options), options)
    if transport == "auto" and options.get("mpi_comm") is not None:
        transport = "mpi"
    if transport == "auto":
        transport = {"mpi": "mpi", "torch": _torch_backend(), "solo": "solo"}[launch.transport]
    if options.get("mpi_comm") is not None and transport != "mpi":
        raise ArgumentError(f"create_communicator: mpi_comm goes with the mpi transport, not with {transport!r}")
    if transport == "threads":
        raise ArgumentError("create_communicator: ranks that are threads are started by torchmn.run_threads(fn, size)")
    if transport == "nccl" and not torch.cuda.is_available():
        raise ArgumentError(
            f"create_communicator: {name!r} needs a GPU that torch can see, and there is none. "
            "On CPUs use 'mpi' under mpiexec or 'gloo' under torchrun; 'auto' chooses."
        )
    if transport == "solo":
        size = launch.size or _load_mpi(settings, launch).COMM_WORLD.size
        if max(size, launch.least) > 1:
            raise ArgumentError(
                f"create_communicator: 'solo', but according to {launch.title} this is rank {launch.rank} of "
                f"{max(size, launch.least)}, and each process would train for itself. Use 'auto'; and "
                "comm.split(comm.rank) for a communicator of one rank"
            )
        return _placed(Communicator(SoloTransport.of_world(settings)), options)
    if transport == "mpi":
        return _placed(_mpi(settings, options.get("mpi_comm"), launch), options)
    return _placed(_process_group(transport, settings, launch), options)


class UnknownKeyword(ArgumentError, TypeError):
    """A keyword that create_communicator does not have."""


def _next_name() -> str:
    """`world`, then `world2`, ...: ranks create their communicators in the same order, so names match."""
    process.worlds += 1
    return "world" if process.worlds == 1 else f"world{process.worlds}"


def _settings(options: dict[str, Any]) -> Settings:
    settings = Settings()
    grad_dtype = options.get("grad_dtype")
    if grad_dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(
            f"create_communicator: expected grad_dtype to be torch.float16, torch.bfloat16 or None, got {grad_dtype!r}"
        )
    settings.grad_dtype = grad_dtype
    timeout = options.get("timeout")
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(f"create_communicator: expected timeout to be seconds > 0, got {timeout!r}")
        settings.timeout = float(timeout)
    if options.get("device") is not None:
        try:
            options["device"] = torch.device(options["device"])
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"create_communicator: expected device like 'cpu' or 'cuda:0': {error}") from None
    return settings


def _torch_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _placed(comm: Communicator, options: dict[str, Any]) -> Communicator:
    """`comm` with its device: the one asked for, or this rank's GPU by its place on the host, or the CPU."""
    device = options.get("device")
    if device is not None:
        comm.settings.device = device
    elif torch.cuda.is_available():
        comm.settings.device = torch.device("cuda", comm.intra_rank % torch.cuda.device_count())
        torch.cuda.set_device(comm.settings.device)
    return comm


def _among_threads(world: Communicator, settings: Settings, options: dict[str, Any]) -> Communicator:
    """All ranks of `run_threads`, where a program that creates its communicator itself runs in it."""
    comm = world.split(0, world.rank)  # one of its own, as on every transport: who finalizes it leaves `world` alone
    assert comm is not None
    for name in ("grad_dtype", "timeout"):  # what was not asked for now is as `run_threads` was asked for it
        if options.get(name) is not None:
            setattr(comm.settings, name, getattr(settings, name))
    return comm


def _load_mpi(settings: Settings, launch: environment.Launch) -> Any:
    try:
        with small_unused_buffers(launch.name), process_hooks.time_limit(settings.timeout):
            from mpi4py import MPI

            return MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"the mpi transport needs mpi4py and an MPI library: {error}. "
            "Install one with: pip install 'torchmn[mpich]'; `torchmn doctor` checks it."
        ) from error


def _mpi(settings: Settings, mpi_comm: Any, launch: environment.Launch) -> Communicator:
    MPI = _load_mpi(settings, launch)  # noqa: N806  (a module)
    from torchmn.communicators.transports.mpi import MPITransport, allgather_plain, end_job

    problem = _world_problem(launch, MPI.COMM_WORLD.size, given=mpi_comm is not None)
    if problem:
        library = MPI.Get_library_version().split("\n")[0].strip()
        raise LaunchError(
            f"rank {launch.rank}: according to {launch.title} there are {launch.size or f'at least {launch.least}'} "
            f"ranks, but the MPI library that mpi4py loaded ({library}) sees {MPI.COMM_WORLD.size}: {problem}"
        )
    with process_hooks.time_limit(settings.timeout):
        point_to_point = (mpi_comm or MPI.COMM_WORLD).Dup()
        fastpath = _fastpath()
        switches = settings.switches() | {"TORCHMN_FASTPATH": fastpath is not None}
        gathered = allgather_plain(point_to_point, (*Machine.here(), switches))
        hosts = names_of_hosts([Machine(name, boot) for name, boot, _ in gathered])
        rank = point_to_point.rank
        _check_switches([theirs for *_, theirs in gathered], rank)
        group = Group.of_world(_next_name(), hosts, Watch(rank, hosts[rank]), settings)
        make = MPITransport if fastpath is None else fastpath.HostTransport.of_world
        world = Communicator(make(group, point_to_point))
        process_hooks.start_watchdog(world, end_job)
    return world


def _fastpath() -> Any:
    """The module of faster transports; None if `TORCHMN_FASTPATH=0`, or if that package was taken away."""
    if os.environ.get("TORCHMN_FASTPATH", "1") == "0":
        return None
    return optional_module("torchmn.communicators.fastpath", "transport")


def _check_switches(gathered: Sequence[dict[str, bool]], rank: int) -> None:
    """Raises, on every rank, if a switch is on for some ranks and off for others: they would wait for each other."""
    for variable in gathered[0]:
        off = [each for each, switches in enumerate(gathered) if not switches[variable]]
        if 0 < len(off) < len(gathered):
            raise MismatchError(
                f"rank {rank} of {len(gathered)}: create_communicator: {variable}=0 on rank {ranks_text(off)} only: "
                "set it on every rank, or on none"
            )


def _world_problem(launch: environment.Launch, seen: int, given: bool) -> str | None:
    """Why the `seen` ranks of MPI.COMM_WORLD are not those that the launcher started; None if they may be.

    `given`: the caller passed a communicator of MPI, and asks for nothing of the launcher.
    """
    if launch.transport == "mpi":
        if seen == launch.size or (launch.size is None and seen >= launch.least):
            return None
        return "launcher and library belong to different MPIs. `torchmn doctor` tells which."
    if given or seen > 1 or launch.least == 1:
        return None
    return (
        f"each process would train for itself. With {launch.title} ranks meet over gloo, or nccl where there are GPUs: "
        "use 'auto'. For MPI start the script with `mpiexec -n N`, or with `torchmn run -n N` and no `--transport`."
    )


def _process_group(backend: str, settings: Settings, launch: environment.Launch) -> Communicator:
    from torchmn.communicators.transports import process_group

    if launch.transport == "solo":
        raise ArgumentError(
            f"create_communicator: {backend!r} needs a launcher: `torchrun --nproc-per-node 2 script.py`, or "
            "`torchmn run -n 2 --transport gloo script.py`. For one process use 'auto'."
        )
    by_torch = environment.detect(only="torch")
    if launch.size is None and by_torch.transport == "torch":
        launch = by_torch
    if launch.size is None:
        raise LaunchError(
            f"create_communicator: {backend!r} needs the number of ranks, which {launch.title} does not tell. "
            "Use 'auto' for MPI, start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    world = Communicator(process_group.create(backend, settings, launch, _next_name()))
    with process_hooks.time_limit(settings.timeout):
        _check_switches(world.buffers.allgather_plain(settings.switches()), world.rank)
        process_hooks.start_watchdog(world, process_group.end_nothing, os.environ["MASTER_ADDR"])
    return world
