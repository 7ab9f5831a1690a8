"""Emulates hosts on one machine: Linux network namespaces, linked at a set rate. Needs root, `ip`, `tc`, `setpriv`.

`benchmarks.emulation.wire` measures how close transfers come to bytes / rate. The settings were chosen with plain
sockets on an idle machine: packets of 1,500 bytes took 1.046 times bytes / rate, packets of 9,000 bytes 1.008; a queue
of 0.4 MB took 1.04 and was unfair, queues of 1 to 16 MB took 1.008; bursts of 0.5 to 8 ms made no difference. Beside
four large flows, a small message was answered in 43 ms; with short queues per connection (`set_packets`), in 6.5 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from benchmarks.emulation.agents import run_agents
from benchmarks.emulation.namespaces import (
    MTU,
    add_namespace,
    check_machine,
    exists,
    in_namespace,
    kill_processes,
    limit_interface,
    remove_namespace,
    remove_stale_namespaces,
    run_tool,
    set_packets,
)
from dmt.errors import InputError

__all__ = ["MAX_HOSTS", "UPLINK", "EmulatedHosts", "sent_bytes"]

UPLINK = "up0"
"""Name of the network interface to the other hosts, the same on every host."""
MAX_HOSTS = 64
"""Largest number of hosts on one machine; a larger one is probably a mistake."""


def sent_bytes(interface: str) -> int:
    """Returns the bytes that an interface of this process's network namespace has sent, from ``/proc/net/dev``.

    Raises:
        InputError: there is no such interface.

    Example:
        >>> sent_bytes("lo") >= 0
        True
    """
    return _sent_bytes(Path("/proc/net/dev").read_text(), interface)


def _sent_bytes(table: str, interface: str) -> int:
    names = []
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        names.append(name.strip())
        if names[-1] == interface:
            return int(numbers.split()[8])
    raise InputError(
        f"interface={interface!r} is not in /proc/net/dev, which has {', '.join(names)}. Name one of them."
    )


class EmulatedHosts:
    """Context manager that emulates H hosts, each a network namespace with one uplink to a switch.

    Sending and receiving are each limited to the rate, as on a full-duplex network card; traffic inside a host is not
    limited. All namespaces are named ``dmt-PID-...``; the machine's own network does not change. They are removed with
    all their processes at the end, and also after an exception, Ctrl-C or SIGTERM. Namespaces that a killed run left
    are removed when the next run starts.

    Args:
        num_hosts: H, 1 to 64.
        mbit_per_s: rate of every uplink in each direction; None for no limit.

    Raises:
        InputError: a value is out of range, the user is not root, a tool is absent, or a namespace exists already.

    Example::

        with EmulatedHosts(2, mbit_per_s=200) as hosts:
            hosts.torchrun(["-m", "benchmarks.emulation.wire", "spec.json"], ranks_per_host=2, timeout=60)
    """

    def __init__(self, num_hosts: int, *, mbit_per_s: float | None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise InputError(f"num_hosts={num_hosts} must be from 1 to {MAX_HOSTS}.")
        if mbit_per_s is not None and not 1 <= mbit_per_s <= 1e6:
            raise InputError(f"mbit_per_s={mbit_per_s} must be from 1 to 1,000,000, or None for no limit.")
        check_machine()
        self.num_hosts = num_hosts
        self.mbit_per_s = mbit_per_s
        self._switch = f"dmt-{os.getpid()}-switch"
        self._hosts = [f"dmt-{os.getpid()}-h{host}" for host in range(num_hosts)]
        self._handlers: dict[int, Any] = {}
        remove_stale_namespaces()
        for name in (self._switch, *self._hosts):
            if exists(name):
                raise InputError(
                    f"Network namespace {name} exists already. Leave the `with` block of this process's other hosts "
                    f"first, or remove it with `ip netns delete {name}`."
                )

    def namespace(self, host: int) -> str:
        """Returns the name of a host's network namespace, for ``ip netns exec``."""
        return self._hosts[host]

    def address(self, host: int) -> str:
        """Returns a host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> EmulatedHosts:
        self._catch_signals()
        try:
            self._make()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def uplink_bytes(self) -> list[int]:
        """Returns the bytes that each host has sent on its uplink so far."""
        tables = [run_tool("ip", "netns", "exec", name, "cat", "/proc/net/dev") for name in self._hosts]
        return [_sent_bytes(table, UPLINK) for table in tables]

    def torchrun(
        self, arguments: Sequence[str], *, ranks_per_host: int, timeout: float, env: Mapping[str, str] | None = None
    ) -> None:
        """Runs a job from the repository's root, with one ``torchrun`` agent per host and ranks in host order.

        Prints the output of host 0. No process of the job outlives the call.

        Args:
            arguments: arguments after torchrun's own options: a script, or ``-m`` and a module, with its arguments.
            ranks_per_host: number of ranks on every host.
            timeout: seconds after which all agents are killed.
            env: variables added to this process's environment.

        Raises:
            RuntimeError: an agent failed; the message ends with the last lines of every host.
            TimeoutError: the job did not end in time.
        """
        # PyTorch warns about every address without a name; the user's own settings override these two.
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        try:
            run_agents(
                [self._agent(host, ranks_per_host, arguments) for host in range(self.num_hosts)],
                timeout=timeout,
                env={**quiet, **os.environ, "GLOO_SOCKET_IFNAME": UPLINK, **(env or {})},
            )
        finally:
            for name in self._hosts:
                kill_processes(name)

    def _agent(self, host: int, ranks_per_host: int, arguments: Sequence[str]) -> list[str]:
        return in_namespace(
            self._hosts[host],
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={self.num_hosts}", f"--node-rank={host}", f"--nproc-per-node={ranks_per_host}"),
            *(f"--master-addr={self.address(0)}", "--master-port=29500", f"--local-addr={self.address(host)}"),
            *arguments,
        )

    def _make(self) -> None:
        mtu = ("mtu", str(MTU))
        switch = ("ip", "-n", self._switch)
        for name in (self._switch, *self._hosts):
            add_namespace(name)
        run_tool(*switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
        run_tool(*switch, "link", "set", "switch", *mtu, "up")
        for host, name in enumerate(self._hosts):
            port, wire = f"port{host}", ("peer", "name", UPLINK, *mtu, "netns", name)
            run_tool(*switch, "link", "add", port, *mtu, "type", "veth", *wire)
            run_tool(*switch, "link", "set", port, "master", "switch", "up")
            run_tool("ip", "-n", name, "link", "set", UPLINK, "up")
            run_tool("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", UPLINK)
            if self.mbit_per_s is not None:
                set_packets(name, UPLINK, self.mbit_per_s)
                limit_interface(name, UPLINK, self.mbit_per_s)
                limit_interface(self._switch, port, self.mbit_per_s)

    def _catch_signals(self) -> None:
        """Turns SIGTERM and SIGHUP into exceptions, unless the program handles them itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _leave)

    def _close(self) -> None:
        # An ExitStack runs all callbacks, even if some fail.
        with contextlib.ExitStack() as stack:
            for number, handler in self._handlers.items():
                stack.callback(signal.signal, number, handler)
                signal.signal(number, signal.SIG_IGN)
            for name in (self._switch, *self._hosts):
                stack.callback(remove_namespace, name)
        self._handlers.clear()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
