"""Hosts on one machine: network namespaces joined by a bridge, whose links can be cut, slowed down and made lossy.

    import hosts
    hosts.enter()                        # first of all: starts the program again, in namespaces of its own, which end with it
    net = hosts.Hosts(2)                 # node0 and node1, 10.77.0.1 and 10.77.0.2; this program is 10.77.0.254
    net[0].start(["hostname"]).wait()    # a subprocess.Popen
    net.shape(0, rate="1gbit", delay=0.005, loss=0.01)
    net.cut(1); net.mend(1)              # silently, as a switch far away would; net.cut(1, 2) between these two alone

Where namespaces can't be made, enter() says why and ends with status 77, which ctest takes as skipped. Each host has its own /dev/shm, its own
/etc/hosts with the names of all, and TESSERA_HOST_ID. Links are shaped in both directions: the rate by tc's tbf, delay and loss by a process that
passes frames on, because few kernels have netem. A frame holds up to 64 kB, as the sender's kernel made it.
"""
import collections
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
INSIDE = "TESSERA_TEST_WIRE"


def enter():
    """Starts this program again in a network, a table of processes and mounts of its own; where it is there already, does nothing."""
    if os.environ.pop(INSIDE, None):
        return
    missing = [program for program in ("ip", "tc", "unshare", "nsenter", "setpriv") if not shutil.which(program, path=_path())]
    if missing:
        skip(f"there is no program {' or '.join(missing)} (Debian's packages iproute2 and util-linux)")
    apart = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net", "--mount", "--pid", "--fork", "--kill-child",
             "--mount-proc"]
    tried = subprocess.run([*apart, "sh", "-c", "ip link add one type veth peer name two && ip link add bridge type bridge"],
                           env=os.environ | {"PATH": _path()}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if tried.returncode != 0:
        skip(f"no network namespaces can be made here: {tried.stderr.strip()}")
    sys.stdout.flush()
    os.environ |= {INSIDE: "1", "PATH": _path()}
    os.execvp(apart[0], [*apart, sys.executable, *sys.argv])


def skip(reason):
    print(f"skipped: {reason}", flush=True)
    sys.exit(SKIPPED)


def _path():
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _do(*command):
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def _child(command, **more):
    """A process that ends with this one."""
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *[str(word) for word in command]], stdin=subprocess.DEVNULL, **more)


class Host:
    """One namespace. It ends with its processes, the last of which only waits."""

    def __init__(self, index, folder, network):
        self.index, self.name, self.address = index, f"node{index}", f"{network}.{index + 1}"
        self.mac, self.port = f"02:00:00:00:00:{index + 1:02x}", f"port{index}"
        self.names = folder / f"hosts{index}"
        self.relay = None
        self.boot()

    def boot(self):
        self.names.write_text("")
        ready, told = os.pipe()
        self.keeper = _child(["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c",
                              f"mount -t tmpfs shm /dev/shm && mount --bind {self.names} /etc/hosts && hostname {self.name} && "
                              f"ip link set lo up && echo && exec sleep infinity"], stdout=told)
        os.close(told)
        with os.fdopen(ready) as said:
            if not said.readline():
                raise RuntimeError(f"{self.name} can't be made; what failed is said above")
        _do("ip", "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "address", self.mac, "netns", self.keeper.pid)
        _do("ip", "link", "set", self.port, "master", "wire", "up")
        self.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")

    def inside(self, command):
        return ["nsenter", f"--target={self.keeper.pid}", "--net", "--uts", "--mount", "--ipc", f"--wd={os.getcwd()}",
                *[str(word) for word in command]]

    def do(self, *command):
        _do(*self.inside(command))

    def start(self, command, env=None, **more):
        """Starts a command on this host; `env` is added to this process's environment."""
        variables = os.environ | {"TESSERA_HOST_ID": self.name} | {name: str(value) for name, value in (env or {}).items()}
        return _child(self.inside(command), env=variables, **more)

    def processes(self):
        mine = os.readlink(f"/proc/{self.keeper.pid}/ns/net")
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/net") == mine and int(folder.name) != self.keeper.pid:
                    yield int(folder.name)
            except OSError:
                continue

    def kill(self):
        """Kills its processes; the kernel still tells its peers."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def end(self):
        if self.keeper.poll() is not None:
            return
        self.kill()
        self.keeper.kill()
        self.keeper.wait()
        subprocess.run(["ip", "link", "delete", self.port], capture_output=True)  # which may be gone with the namespace


class Hosts:
    def __init__(self, count=2, network="10.77.0"):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        _do("ip", "link", "set", "lo", "up")
        _do("ip", "link", "add", "wire", "type", "bridge", "stp_state", 0)
        _do("ip", "address", "add", f"{network}.254/24", "dev", "wire")
        _do("ip", "link", "set", "wire", "up")
        self.hosts = [Host(index, self.folder, network) for index in range(count)]
        for host in self.hosts:
            self.name(host.index)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getitem__(self, index):
        return self.hosts[index]

    def __len__(self):
        return len(self.hosts)

    def close(self):
        for host in self.hosts:
            self._end_relay(host)
            host.end()
        _do("ip", "link", "delete", "wire")
        shutil.rmtree(self.folder, ignore_errors=True)

    def name(self, index, **names):
        """Sets what one host's /etc/hosts says: the truth, then `names`, such as node0="10.77.0.3" (a list for several addresses)."""
        lines = {"localhost": ["127.0.0.1"]} | {host.name: [host.address] for host in self.hosts}
        for name, addresses in names.items():
            lines[name] = [addresses] if isinstance(addresses, str) else addresses
        self[index].names.write_text("".join(f"{address} {name}\n" for name, all_of_it in lines.items() for address in all_of_it))

    def cut(self, index, other=None):
        """From now on frames are lost silently: all of a host's, or those between two."""
        if other is None:
            _do("ip", "link", "set", self._outer(index), "nomaster")
        else:
            for one, two in ((index, other), (other, index)):
                self[one].do("ip", "neighbour", "replace", self[two].address, "lladdr", "02:00:00:00:00:fe", "dev", "eth0", "nud", "permanent")

    def mend(self, index, other=None):
        if other is None:
            _do("ip", "link", "set", self._outer(index), "master", "wire")
        else:
            for one, two in ((index, other), (other, index)):
                self[one].do("ip", "neighbour", "delete", self[two].address, "dev", "eth0")

    def vanish(self, index):
        """As a host without power: its peers are told nothing, and what comes back by boot() knows nothing of its connections."""
        self.cut(index)
        self._end_relay(self[index])
        self[index].end()

    def boot(self, index):
        self[index].boot()
        self.name(index)

    def shape(self, index, rate=None, delay=0, loss=0):
        """Gives a host's link a rate ("1gbit") and, for each direction, a delay in seconds and a share of lost frames; without them, takes them away."""
        host = self[index]
        for at in ([], host.inside([])):
            device = "eth0" if at else host.port
            subprocess.run([*at, "tc", "qdisc", "delete", "dev", device, "root"], capture_output=True)  # there may be none
            if rate:
                _do(*at, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
        if self._end_relay(host):
            _do("ip", "link", "set", host.port, "master", "wire")
        if delay or loss:
            _do("ip", "link", "add", f"near{index}", "type", "veth", "peer", "name", f"far{index}")
            _do("ip", "link", "set", f"near{index}", "up")
            _do("ip", "link", "set", host.port, "nomaster")
            _do("ip", "link", "set", f"far{index}", "master", "wire", "up")
            ready, told = os.pipe()
            host.relay = _child([sys.executable, __file__, "relay", host.port, f"near{index}", delay, loss], stdout=told)
            os.close(told)
            with os.fdopen(ready) as said:
                said.readline()

    @staticmethod
    def _end_relay(host):
        relay, host.relay = host.relay, None
        if relay:
            relay.kill()
            relay.wait()
            _do("ip", "link", "delete", f"near{host.index}")
        return relay

    def _outer(self, index):
        return f"far{index}" if self[index].relay else self[index].port


def relay(one, two, delay, loss):
    """Passes frames on between two interfaces, later, and not all of them."""
    SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
    ends = []
    for interface in (one, two):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # so that large frames and missing checksums stay what they are
        end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        end.bind((interface, ETH_P_ALL))
        ends.append(end)
    print(flush=True)
    waiting = collections.deque()
    while True:
        patience = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], patience)[0]:
            try:
                frame = end.recv(1 << 17)
            except OSError:  # the interface is down
                continue
            if random.random() >= loss:
                waiting.append((time.monotonic() + delay, ends[1 - ends.index(end)], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            try:
                end.send(frame)
            except OSError:  # the interface is down or its queue is full: the frame is lost
                continue


if __name__ == "__main__" and sys.argv[1:2] == ["relay"]:
    relay(sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
