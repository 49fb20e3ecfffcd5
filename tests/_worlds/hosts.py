"""Hosts on this machine, made of Linux namespaces: each has its own network, host name, /etc/hosts and /dev/shm.

Ranks of different hosts reach each other by the network only, as in a cluster. Everything else (disks, cores, the
kernel and its boot number, users) is this machine's. A host lives as long as a process that holds it, which reads from
a pipe of ours: so it ends with this process, however that ends, and there is nothing to clean up by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
LINK_SECONDS = 10.0
NAMESPACES = ("--net", "--uts", "--mount", "--ipc")
# What a Debian installs: the host's own name leads to an address that other hosts do not reach.
ETC_HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n"


class NoHosts(Exception):
    """Hosts cannot be created here; the message gives the reason."""


class Hosts:
    """Hosts with a cable each to one switch.

    Args:
        ranks: the number of ranks on each host: {"north": 2, "south": 1}.
        called: a name that all hosts have, as containers may.
        rate: of each cable in both directions, as `tc` writes it ("100mbit"); by default it is not limited.
    """

    def __init__(self, ranks: Mapping[str, int], called: str | None = None, rate: str | None = None):
        self.ranks = dict(ranks)
        self._called = called
        self._rate = rate
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._switch: subprocess.Popen[str] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="torchmn-hosts-"))
        self.addresses = {name: f"10.213.77.{number}" for number, name in enumerate(ranks, start=1)}

    def __enter__(self) -> Hosts:
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if not sys.platform.startswith("linux") or os.geteuid() != 0 or missing:
            self._end()
            raise NoHosts(f"network namespaces need Linux, root, and {', '.join(missing or TOOLS)}")
        try:
            for name in self.ranks:
                self._hold(name)
            self._join()
        except (OSError, subprocess.SubprocessError) as error:
            self._end()
            raise NoHosts(f"network namespaces cannot be created: {error}") from error
        except BaseException:
            self._end()
            raise
        self._ssh().chmod(0o755)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def commands(self, launcher: list[str], command: list[str]) -> list[list[str]]:
        """What starts `command` on every rank of every host: one launcher, or, without, each rank by itself."""
        if not launcher:
            return [[*self.enter(name), *command] for name, count in self.ranks.items() for _ in range(count)]
        where = ",".join(f"{name}:{count}" for name, count in self.ranks.items())
        if Path(launcher[0]).name == "mpirun":  # Open MPI
            agent = ["--prtemca", "plm_ssh_agent", str(self._ssh()), "--prtemca", "prte_if_include", "eth0"]
            options = ["--allow-run-as-root", *agent, "--host", where, "--mca", "btl_tcp_if_include", "eth0"]
            return [[*self.enter(next(iter(self.ranks))), *launcher, *options, *command]]
        options = ["-launcher", "ssh", "-launcher-exec", str(self._ssh()), "-hosts", where]
        if self._called:
            options += ["-iface", "eth0"]  # the launcher's daemons would look for it by that name
        return [[*self.enter(next(iter(self.ranks))), *launcher, *options, *command]]

    def environment(self) -> dict[str, str]:
        """What ranks on these hosts find in their environment."""
        return {"MASTER_ADDR": next(iter(self.addresses.values()))}

    def _hold(self, name: str) -> None:
        etc_hosts = self._directory / f"hosts.{name}"
        others = "".join(f"{address} {other}\n" for other, address in self.addresses.items() if other != name)
        etc_hosts.write_text(ETC_HOSTS.format(own=self._called or name) + others)
        self._holders[name] = _held(
            f"hostname {self._called or name} && mount --bind {etc_hosts} /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
        )

    def _join(self) -> None:
        """Connects every host to the switch, a further namespace."""
        self._switch = _held("ip link add name switch type bridge && ip link set switch up")
        inside = ["nsenter", "-t", str(self._switch.pid), "--net"]
        for number, (name, address) in enumerate(self.addresses.items()):
            port, pid = f"port{number}", self._holders[name].pid
            _run(*inside, *f"ip link add name {port} type veth peer name eth0 netns {pid}".split())
            _run(*inside, *f"ip link set {port} master switch up".split())
            for words in (f"address add {address}/24 dev eth0", "link set eth0 up"):
                _run(*self.enter(name), "ip", *words.split())
            if self._rate:
                limit = f"root tbf rate {self._rate} burst 64kb latency 100ms"
                _run(*inside, *f"tc qdisc add dev {port} {limit}".split())
                _run(*self.enter(name), *f"tc qdisc add dev eth0 {limit}".split())
        deadline = time.monotonic() + LINK_SECONDS
        while not all("UP" in _run(*self.enter(name), "ip", "-brief", "link", "show", "eth0") for name in self.ranks):
            if time.monotonic() > deadline:
                raise OSError(f"the links between them are not up after {LINK_SECONDS:g} s")
            time.sleep(0.02)

    def enter(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._holders[name].pid), *NAMESPACES]

    def _ssh(self) -> Path:
        """A program that is called like ssh, and needs neither a server nor a key."""
        path = self._directory / "ssh"
        if not path.exists():
            cases = "".join(f"{name}) holder={holder.pid};;\n" for name, holder in self._holders.items())
            path.write_text(
                "#!/bin/sh\n"
                'while [ "${1#-}" != "$1" ]; do shift; done\n'
                f'case "$1" in\n{cases}*) echo "no host $1" >&2; exit 255;;\nesac\nshift\n'
                f'exec nsenter -t "$holder" {" ".join(NAMESPACES)} sh -c "$*"\n'
            )
        return path

    def _end(self) -> None:
        for holder in [*self._holders.values(), *([self._switch] if self._switch else [])]:
            holder.kill()
            holder.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)


def _held(set_up: str) -> subprocess.Popen[str]:
    """Returns a process that holds new namespaces in which the shell commands `set_up` have run."""
    hold = "ip link set lo up && echo ready && exec cat"
    holder = subprocess.Popen(
        ["unshare", *NAMESPACES, "--propagation", "private", "sh", "-c", f"{set_up} && {hold}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdout is not None
    words = holder.stdout.readline().strip()
    if words != "ready":
        raise OSError(words or "no output")
    return holder


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.partition("<")[0]
