"""Rungs across hosts: names, ssh, the same software, and ranks that meet."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.checks.probing import PROBE, SLOW_IN_A_NETWORK, meeting, probed, speed
from torchmn.cli.launch.job import allow_root
from torchmn.cli.launch.mpi_installation import LIBRARY_VARIABLE, Installation, library_environment
from torchmn.cli.launch.other_python import WITHOUT_WORKING_DIRECTORY
from torchmn.communicators.launchers.environment import cleared
from torchmn.communicators.watchdog.process_hooks import CUT_OFF

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
ASK_VERSIONS = (
    "import json, sys; from importlib.metadata import version; "
    "print(json.dumps([sys.version.split()[0], *(version(name) for name in ('torch', 'mpi4py', 'torchmn'))]))"
)


def across(hosts: Sequence[str], installation: Installation | None) -> Iterator[Finding]:
    """The findings about these hosts, up to the first that does not hold."""
    for rung in (names, ssh, same_software):
        finding = rung(hosts)
        yield finding
        if finding.level == "FAIL":
            return
    if installation is None:
        yield fail("ranks across hosts", "no MPI on this host", "mend the rungs about MPI above first")
        return
    result = probed(*mpiexec_across(hosts, installation))
    advice = (
        "a firewall between the hosts? MPI needs every TCP port above 1023 between them. More than one network?"
        " Name the right one: MPICH -iface eth0, Open MPI --mca btl_tcp_if_include eth0"
    )
    yield meeting("ranks across hosts", result, len(hosts), advice)
    if result.answer is not None:
        yield distinct(hosts, result.answer["hosts"])
        yield speed(
            "speed across hosts",
            result.answer,
            SLOW_IN_A_NETWORK,
            "if the network can do better, the wrong one is used: name its interface, as above",
        )
        yield watchdog(hosts, installation)


def names(hosts: Sequence[str]) -> Finding:
    """Whether every name has an address."""
    addresses = {}
    for host in hosts:
        try:
            addresses[host] = socket.gethostbyname(host)
        except OSError as error:
            return fail("names of hosts", f"{host} has no address ({error})", "correct it, or add it to /etc/hosts")
    return ok("names of hosts", ", ".join(f"{host} is {address}" for host, address in addresses.items()))


def ssh(hosts: Sequence[str]) -> Finding:
    """Whether ssh reaches every host without asking for anything, as launchers need it."""
    for host in hosts:
        status, _, trouble = on_host(host, "true")
        if status:
            advice = f"set up a key: ssh-copy-id {host}; then `ssh {host} true` must not ask for anything"
            return fail("ssh", f"{host}: {trouble}", advice)
    return ok("ssh", f"reaches {', '.join(hosts)} without a password")


def same_software(hosts: Sequence[str]) -> Finding:
    """Whether every host has this Python at the same path, with the same versions."""
    rung = "same software"
    advice = (
        f"every host needs {sys.executable}, at this path, with the same versions: a shared disk, or the same set-up"
    )
    command = shlex.join([sys.executable, "-c", f"{WITHOUT_WORKING_DIRECTORY}; {ASK_VERSIONS}"])
    versions = {}
    for host in hosts:
        status, out, trouble = on_host(host, command)
        if status:
            return fail(rung, f"{host}: {trouble}", advice)
        versions[host] = json.loads(out.splitlines()[-1])
    if len({tuple(found) for found in versions.values()}) > 1:
        table = "; ".join(
            f"{host}: python {v[0]}, torch {v[1]}, mpi4py {v[2]}, torchmn {v[3]}" for host, v in versions.items()
        )
        return fail(rung, table, advice)
    return ok(rung, f"{sys.executable} with the same versions on every host")


def on_host(host: str, command: str) -> tuple[int, str, str]:
    """Exit status, output and last words of a command on a host."""
    try:
        result = subprocess.run(
            [*SSH, host, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return 127, "", "there is no ssh on this machine"
    except subprocess.TimeoutExpired:
        return 124, "", "no answer within 60 s"
    words = (result.stderr or result.stdout).strip().splitlines()
    return result.returncode, result.stdout, words[-1] if words else f"exit status {result.returncode}"


def watchdog(hosts: Sequence[str], installation: Installation) -> Finding:
    """Whether our communicator works across the hosts, and its watchdog has a line between them."""
    rung = "the watchdog across hosts"
    result = probed(*mpiexec_across(hosts, installation, "torchmn"))
    warned = [line for line in result.warnings.splitlines() if CUT_OFF in line]
    if warned:
        advice = "allow TCP to every port above 1023 of rank 0's host; without it a stuck job tells less, and later"
        return warn(rung, warned[0].removeprefix("torchmn: "), advice)
    return meeting(
        rung, result, len(hosts), "`mpiexec -hosts ... python script.py` with a script of two lines tells more"
    )


def mpiexec_across(
    hosts: Sequence[str], installation: Installation, mode: str = "mpi"
) -> tuple[list[str], dict[str, str]]:
    """The command, and its environment, that starts the probe once on each host."""
    environment = {**cleared(), **library_environment(installation)}
    if installation.flavour.name == "openmpi":
        options = ["--host", ",".join(f"{host}:1" for host in hosts), "--map-by", "node"]
        if environment.get(LIBRARY_VARIABLE):
            options += ["-x", LIBRARY_VARIABLE]  # Hydra hands the whole environment on, Open MPI does not
        environment |= allow_root()
    else:
        options = ["-hosts", ",".join(hosts), "-ppn", "1"]
    command = [str(installation.mpiexec), *options, "-n", str(len(hosts)), sys.executable, PROBE, mode]
    return command, environment


def distinct(hosts: Sequence[str], reached: Sequence[str]) -> Finding:
    """Whether the names stand for as many machines."""
    rung, machines = "one rank per host", sorted(set(reached))
    if len(machines) < len(hosts):
        found = f"{', '.join(hosts)} are {len(machines)} machine(s): {', '.join(machines)}"
        return warn(rung, found, "two names of one machine, or host names that are not unique")
    return ok(rung, ", ".join(machines))
