"""Checks across hosts: names, ssh, the same software, ranks that reach each other."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.checks.probing import PROBE, SLOW_NETWORK, rank_finding, run_probe, speed_finding
from torchmn.cli.launch.job import allow_root
from torchmn.cli.launch.mpi_installation import LIBRARY_VARIABLE, Installation, library_environment
from torchmn.cli.launch.python_subprocess import WITHOUT_WORKING_DIRECTORY
from torchmn.communicators.launchers.environment import cleared
from torchmn.communicators.watchdog.control_channel import CUT_OFF

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
WORKING_DIRECTORY_OPTIONS = "MPICH `mpiexec -wdir DIR`, Open MPI `mpirun --wdir DIR`, Slurm `srun --chdir=DIR`"
VERSIONS_QUERY = (
    "import json, sys; from importlib.metadata import version; "
    "print(json.dumps([sys.version.split()[0], *(version(name) for name in ('torch', 'mpi4py', 'torchmn'))]))"
)


def across(hosts: Sequence[str], installation: Installation | None) -> Iterator[Finding]:
    """Runs the checks of these hosts, up to the first that fails."""
    for check in (names, ssh, same_software, working_directory):
        finding = check(hosts)
        yield finding
        if finding.level == "FAIL":
            return
    if installation is None:
        yield fail("ranks across hosts", "no MPI on this host", "fix the checks of MPI above first")
        return
    result = run_probe(*mpiexec_across(hosts, installation))
    advice = (
        "check firewalls: MPI needs every TCP port above 1023 between the hosts. With several networks, select"
        " one: MPICH -iface eth0, Open MPI --mca btl_tcp_if_include eth0"
    )
    yield rank_finding("ranks across hosts", result, len(hosts), advice)
    if result.answer is not None:
        yield distinct(hosts, result.answer["hosts"])
        yield speed_finding(
            "speed across hosts",
            result.answer,
            SLOW_NETWORK,
            "if the network is faster than this, select its interface as above",
        )
        yield watchdog(hosts, installation)


def names(hosts: Sequence[str]) -> Finding:
    """Checks that every name has an address."""
    addresses = {}
    for host in hosts:
        try:
            addresses[host] = socket.gethostbyname(host)
        except OSError as error:
            return fail("names of hosts", f"{host} has no address ({error})", "correct it, or add it to /etc/hosts")
    return ok("names of hosts", ", ".join(f"{host}: {address}" for host, address in addresses.items()))


def ssh(hosts: Sequence[str]) -> Finding:
    """Checks that ssh reaches every host without a prompt, as launchers need it."""
    for host in hosts:
        status, _, problem = on_host(host, "true")
        if status:
            advice = f"set up a key: ssh-copy-id {host}; then `ssh {host} true` must run without a prompt"
            return fail("ssh", f"{host}: {problem}", advice)
    return ok("ssh", f"reaches {', '.join(hosts)} without a password")


def same_software(hosts: Sequence[str]) -> Finding:
    """Checks that every host has this Python at the same path, with the same versions."""
    check = "same software"
    advice = f"install the same versions at the same path ({sys.executable}) on every host, or use a shared disk"
    command = shlex.join([sys.executable, "-c", f"{WITHOUT_WORKING_DIRECTORY}; {VERSIONS_QUERY}"])
    versions = {}
    for host in hosts:
        status, out, problem = on_host(host, command)
        if status:
            return fail(check, f"{host}: {problem}", advice)
        versions[host] = json.loads(out.splitlines()[-1])
    if len({tuple(found) for found in versions.values()}) > 1:
        table = "; ".join(
            f"{host}: python {v[0]}, torch {v[1]}, mpi4py {v[2]}, torchmn {v[3]}" for host, v in versions.items()
        )
        return fail(check, table, advice)
    return ok(check, f"{sys.executable} with the same versions on every host")


def working_directory(hosts: Sequence[str]) -> Finding:
    """Checks that every host has this working directory, in which launchers start the ranks."""
    check, here = "working directory", os.getcwd()
    for host in hosts:
        if on_host(host, f"cd {shlex.quote(here)}")[0]:
            advice = f"start the job in a directory that all hosts have, or pass one: {WORKING_DIRECTORY_OPTIONS}"
            return fail(check, f"{host} has no directory {here}", advice)
    return ok(check, f"{here} on every host")


def on_host(host: str, command: str) -> tuple[int, str, str]:
    """Returns exit status, output and last line of the errors of a command on a host."""
    try:
        result = subprocess.run(
            [*SSH, host, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return 127, "", "there is no ssh on this machine"
    except subprocess.TimeoutExpired:
        return 124, "", "no answer within 60 s"
    lines = (result.stderr or result.stdout).strip().splitlines()
    return result.returncode, result.stdout, lines[-1] if lines else f"exit status {result.returncode}"


def watchdog(hosts: Sequence[str], installation: Installation) -> Finding:
    """Checks that TorchMN's communicator works across the hosts, with the watchdog's control channel."""
    check = "the watchdog across hosts"
    result = run_probe(*mpiexec_across(hosts, installation, "torchmn"))
    warnings = [line for line in result.warnings.splitlines() if CUT_OFF in line]
    if warnings:
        advice = (
            "allow TCP to every port above 1023 of rank 0's host; without it, reports of a hanging job are later and"
            " less detailed"
        )
        return warn(check, warnings[0].removeprefix("torchmn: "), advice)
    advice = "run a script of two lines with `mpiexec -hosts ... python script.py` for the whole error"
    return rank_finding(check, result, len(hosts), advice)


def mpiexec_across(
    hosts: Sequence[str], installation: Installation, mode: str = "mpi"
) -> tuple[list[str], dict[str, str]]:
    """Returns command and environment that start the probe once on each host."""
    environment = {**cleared(), **library_environment(installation)}
    if installation.flavour.name == "openmpi":
        options = ["--host", ",".join(f"{host}:1" for host in hosts), "--map-by", "node"]
        if environment.get(LIBRARY_VARIABLE):
            options += ["-x", LIBRARY_VARIABLE]  # Hydra passes on the whole environment, Open MPI does not
        environment |= allow_root()
    else:
        options = ["-hosts", ",".join(hosts), "-ppn", "1"]
    command = [str(installation.mpiexec), *options, "-n", str(len(hosts)), sys.executable, PROBE, mode]
    return command, environment


def distinct(hosts: Sequence[str], reached: Sequence[str]) -> Finding:
    """Checks that the names belong to different machines."""
    check, machines = "one rank per host", sorted(set(reached))
    if len(machines) < len(hosts):
        found = f"{', '.join(hosts)} are {len(machines)} machine(s): {', '.join(machines)}"
        return warn(check, found, "remove names of the same machine, or give each host a unique host name")
    return ok(check, ", ".join(machines))
