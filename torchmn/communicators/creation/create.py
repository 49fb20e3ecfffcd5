"""`create_communicator`, which chooses the transport by the launcher that started this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.launchers import environment, pmi
from torchmn.communicators.launchers.allocator import keep_freed_memory
from torchmn.communicators.launchers.topology import Machine, names_of_hosts
from torchmn.communicators.transports.group import Group, Settings, seconds_of
from torchmn.communicators.transports.mpi_library import load, small_unused_buffers
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.communicators.watchdog import process_hooks
from torchmn.communicators.watchdog.observer import Observer
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.communicators.watchdog.waits import Watch
from torchmn.context import here, process
from torchmn.errors import ArgumentError, LaunchError, MismatchError, nearest
from torchmn.optional import optional_module
from torchmn.other_spellings import respelled_call

# Names for `create_communicator`, and their transports. From `naive` on they are ChainerMN's.
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
_logger = logging.getLogger("torchmn.communicators")


@torch.inference_mode(False)  # its buffers may be used outside of that mode
def create_communicator(name: str = "auto", mpi_comm: Any = None, **options: Any) -> Communicator:
    """Returns the communicator of all ranks that were started together. Every rank must call it.

    Inside of `run_threads`, `threads` and, without a launcher, `auto` return a communicator of its ranks.

    Args:
        name: `auto` chooses by the launcher's environment variables: MPI under mpiexec, srun and other MPI launchers,
            nccl or gloo under torchrun, `solo` without a launcher. Explicit: mpi, nccl, gloo, threads, solo. Of
            ChainerMN's names, `naive` and `flat` mean auto, the others nccl. Under an MPI launcher, ranks of nccl and
            gloo agree on an address over MPI, unless MASTER_ADDR is set.
        mpi_comm: an mpi4py communicator to use instead of MPI.COMM_WORLD; `auto` then means mpi.
        **options: `device`: where this rank computes; by default its GPU (by `intra_rank`), or the CPU if it has none.
            `grad_dtype`: torch.float16 or torch.bfloat16 to send gradients compressed; they are summed in float32.
            `timeout`: the longest wait in seconds, or `math.inf`; by default `TORCHMN_TIMEOUT` or 300.

    Returns:
        The communicator.

    Raises:
        ArgumentError: an argument is wrong; or `solo` in one of several processes of a job, each of which would train
            alone. For a communicator of one rank use `comm.split(comm.rank)`, or `mpi_comm=MPI.COMM_SELF`.
        LaunchError: the ranks do not find each other, or launcher and MPI library do not match.
        MismatchError: on every rank, if environment variables that must be equal differ between ranks.
    """
    unknown = next((keyword for keyword in options if keyword not in _KEYWORDS), None)
    if unknown is not None:
        given = ({} if name == "auto" else {"name": name}) | {"mpi_comm": mpi_comm}
        other = respelled_call("create_communicator", (), given | options)
        if other is None:
            raise UnknownKeyword(f"create_communicator: unknown keyword {unknown!r}. {nearest(unknown, _KEYWORDS)}")
        return create_communicator(**other.kwargs)
    if not isinstance(name, str) or name not in NAMES:
        raise ArgumentError(f"create_communicator: unknown communicator {name!r}. {nearest(name, NAMES)}")
    settings = _settings(options)
    keep_freed_memory()
    launch = environment.detect()
    world = here.communicator
    if world is not None and (NAMES[name] == "threads" or (NAMES[name] == "auto" and launch.transport == "solo")):
        comm = _thread_communicator(world, settings, options)
    else:
        transport = _choose_transport(name, launch, mpi_comm)
        if transport == "solo":
            comm = _solo(settings, launch)
        elif transport == "mpi":
            comm = _mpi(settings, mpi_comm, launch)
        else:
            comm = _process_group(transport, settings, launch, mpi_comm)
    _set_device(comm, options.get("device"))
    _log_creation(comm)
    return comm


def _log_creation(comm: Communicator) -> None:
    if comm.rank == 0:
        over = comm.traits.name
        _logger.info("torchmn: %s: %d ranks on %d hosts, over %s", comm.name, comm.size, comm.inter_size, over)


class UnknownKeyword(ArgumentError, TypeError):
    """`create_communicator` was called with a keyword that it does not have."""


def _choose_transport(name: str, launch: environment.Launch, mpi_comm: Any) -> str:
    transport = NAMES[name]
    if transport == "auto" and mpi_comm is not None:
        transport = "mpi"
    if transport == "auto":
        torch_backend = "nccl" if torch.cuda.is_available() else "gloo"
        transport = {"mpi": "mpi", "torch": torch_backend, "solo": "solo"}[launch.transport]
    if mpi_comm is not None and transport != "mpi" and launch.transport != "mpi":
        raise ArgumentError(f"create_communicator: mpi_comm needs the mpi transport, got {transport!r}")
    if transport == "threads":
        raise ArgumentError("create_communicator: ranks that are threads are started by torchmn.run_threads(fn, size)")
    if transport == "nccl" and not torch.cuda.is_available():
        raise ArgumentError(
            f"create_communicator: {name!r} needs a GPU that torch can see, and there is none. "
            "On CPUs use 'mpi' under mpiexec or 'gloo' under torchrun; 'auto' chooses."
        )
    return transport


def _next_name() -> str:
    """Returns `world`, then `world2`, ...: the same on all ranks, which create communicators in the same order."""
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
        settings.timeout = seconds_of(timeout, "create_communicator: timeout")
    if options.get("device") is not None:
        try:
            options["device"] = torch.device(options["device"])
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"create_communicator: expected device like 'cpu' or 'cuda:0': {error}") from None
    return settings


def _set_device(comm: Communicator, device: torch.device | None) -> None:
    """Sets the device of `comm`: the given one, or this rank's GPU by its number on the host, or the CPU."""
    if device is not None:
        comm.settings.device = device
    elif torch.cuda.is_available():
        comm.settings.device = torch.device("cuda", comm.intra_rank % torch.cuda.device_count())
        torch.cuda.set_device(comm.settings.device)


def _thread_communicator(world: Communicator, settings: Settings, options: dict[str, Any]) -> Communicator:
    """Returns a communicator of all ranks of `run_threads`, for a program inside of it that creates one."""
    comm = world.split(0, world.rank)  # a new one, so that `finalize` does not close `world`
    assert comm is not None
    for name in ("grad_dtype", "timeout"):  # options that were not passed are those of `run_threads`
        if options.get(name) is not None:
            setattr(comm.settings, name, getattr(settings, name))
    return comm


def _solo(settings: Settings, launch: environment.Launch) -> Communicator:
    with process_hooks.time_limit(settings.timeout):
        size = max(launch.size or _load_mpi(launch).COMM_WORLD.size, launch.min_size)
    if size > 1:
        raise ArgumentError(
            f"create_communicator: 'solo', but according to {launch.title} this is rank {launch.rank} of {size}, and "
            "each process would train alone. Use 'auto'; and comm.split(comm.rank) for a communicator of one rank"
        )
    return Communicator(SoloTransport.of_world(settings))


def _load_mpi(launch: environment.Launch) -> Any:
    try:
        with small_unused_buffers(launch.name):
            return load(launch.rank)
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"the mpi transport needs mpi4py and an MPI library: {error}. "
            "Install one with: pip install mpich; `torchmn doctor` checks it."
        ) from error


def _mpi(settings: Settings, mpi_comm: Any, launch: environment.Launch) -> Communicator:
    is_first = mpi_comm is None and process.worlds == 0
    observer = Observer(launch, settings.timeout) if is_first and (launch.size or 1) > 1 else None
    with observer.first_contact() if observer else process_hooks.time_limit(settings.timeout):
        MPI = _load_mpi(launch)  # noqa: N806  (a module)
        from torchmn.communicators.transports.mpi import MPITransport, allgather_plain, end_job

        _check_world(MPI, launch, given=mpi_comm is not None)
        point_to_point = (mpi_comm or MPI.COMM_WORLD).Dup()
        fastpath = _fastpath()
        switches = settings.switches() | {"TORCHMN_FASTPATH": fastpath is not None}
        gathered = allgather_plain(point_to_point, (*Machine.here(), switches))
        hosts = names_of_hosts([Machine(name, boot) for name, boot, _ in gathered])
        rank = point_to_point.rank
        _check_switches([each for *_, each in gathered], rank)
        group = Group.of_world(_next_name(), hosts, Watch(rank, hosts[rank]), settings)
        make = MPITransport if fastpath is None else fastpath.HostTransport.of_world
        transport = make(group, point_to_point)
        transport.outside = mpi_comm or MPI.COMM_WORLD
        world = Communicator(transport)
        process_hooks.start_watchdog(world, end_job, observer=observer)
    return world


def _fastpath() -> Any:
    """Returns the module of the faster transport; None if `TORCHMN_FASTPATH=0`, or if it is not installed."""
    if os.environ.get("TORCHMN_FASTPATH", "1") == "0":
        return None
    return optional_module("torchmn.communicators.fastpath", "transport")


def _check_switches(gathered: Sequence[dict[str, bool]], rank: int) -> None:
    """Raises, on every rank, if a switch is on for some ranks and off for others, which would make them hang."""
    for variable in gathered[0]:
        off = [each for each, switches in enumerate(gathered) if not switches[variable]]
        if 0 < len(off) < len(gathered):
            raise MismatchError(
                f"rank {rank} of {len(gathered)}: create_communicator: {variable}=0 on rank {ranks_text(off)} only: "
                "set it on every rank, or on none"
            )


def _check_world(mpi: Any, launch: environment.Launch, given: bool) -> None:
    """Raises if MPI.COMM_WORLD of module `mpi` has other ranks than the launcher started."""
    problem = _world_problem(launch, mpi.COMM_WORLD.size, given)
    if problem:
        library = mpi.Get_library_version()
        problem, library = pmi.srun_problem(library) or problem, library.split("\n")[0].strip()
        raise LaunchError(
            f"rank {launch.rank}: according to {launch.title} there are {launch.size or f'at least {launch.min_size}'} "
            f"ranks, but the MPI library that mpi4py loaded ({library}) sees {mpi.COMM_WORLD.size}: {problem}"
        )


def _world_problem(launch: environment.Launch, seen: int, given: bool) -> str | None:
    """Returns why the `seen` ranks of MPI.COMM_WORLD are not those that the launcher started; None if they may be.

    Args:
        launch: what the launcher's environment variables contain.
        seen: size of MPI.COMM_WORLD.
        given: whether the caller passed an MPI communicator, which need not be that of the launcher.
    """
    if launch.transport == "mpi":
        if seen == launch.size or (launch.size is None and seen >= launch.min_size):
            return None
        return "launcher and library belong to different MPIs. `torchmn doctor` shows which."
    if given or seen > 1 or launch.min_size == 1:
        return None
    return (
        f"each process would train alone. With {launch.title} ranks use gloo, or nccl if there are GPUs: use 'auto'. "
        "For MPI start the script with `mpiexec -n N`, or with `torchmn run -n N` and no `--transport`."
    )


def _process_group(backend: str, settings: Settings, launch: environment.Launch, mpi_comm: Any) -> Communicator:
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
            f"create_communicator: {backend!r} needs the number of ranks, which {launch.title} does not set. "
            "Use 'auto' for MPI, start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    end_job = process_group.end_nothing
    if launch.transport == "mpi" and (mpi_comm is not None or "MASTER_ADDR" not in os.environ):
        with process_hooks.time_limit(settings.timeout):
            mpi = _load_mpi(launch)
        _check_world(mpi, launch, given=mpi_comm is not None)
        from torchmn.communicators.transports.mpi import end_job

        mpi_comm = mpi_comm or mpi.COMM_WORLD
        launch = replace(launch, rank=mpi_comm.rank, size=mpi_comm.size)
    transport, master = process_group.create(backend, settings, launch, _next_name(), mpi_comm)
    world = Communicator(transport)
    with process_hooks.time_limit(settings.timeout):
        _check_switches(world.buffers.allgather_plain(settings.switches()), world.rank)
        process_hooks.start_watchdog(world, end_job, master)
    return world
