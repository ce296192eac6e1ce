"""A job on two hosts through the tunnel of SECURITY.md: on the link between the hosts there are only the tunnel's packets.

tunnel.py BUILD_BIN
"""
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time

import hosts

TESSERA = pathlib.Path(sys.argv[1], "tessera").absolute()
PORT = 51820


def tool(name, *arguments, **more):
    try:
        return subprocess.run([name, *arguments], capture_output=True, text=True, check=True, **more).stdout.strip()
    except FileNotFoundError:
        hosts.skip(f"there is no program {name} (Debian's packages wireguard-tools and wireguard-go)")


class Sniffer:
    """Counts the packets on a link by their protocols: "udp 51820", "tcp", "icmp"."""

    def __init__(self, interface):
        self.seen = {}
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        self.socket.bind((interface, 3))
        threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        while True:
            try:
                frame = self.socket.recv(1 << 16)
            except OSError:  # the link is gone: the test ends
                return
            if frame[12:14] != b"\x08\x00":  # only IPv4: hosts have no other addresses of each other
                continue
            protocol = {1: "icmp", 2: "igmp", 6: "tcp", 17: "udp"}.get(frame[23], str(frame[23]))
            if protocol == "udp":
                begin = 14 + (frame[14] & 15) * 4
                protocol += f" {min(struct.unpack_from('!HH', frame, begin), key=lambda port: port != PORT)}"
            self.seen[protocol] = self.seen.get(protocol, 0) + 1


def dig(net):
    keys = [tool("wg", "genkey") for _ in net.hosts]
    for index, host in enumerate(net.hosts):
        tunnel = f"wg{index}"  # of another name on each host, because wireguard-go's socket has its name, and hosts share the files
        host.start(["wireguard-go", "-f", tunnel], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        own = net.folder / f"key{index}"
        own.touch(mode=0o600)
        own.write_text(keys[index])
        other = net.hosts[1 - index]
        setting = ["wg", "set", tunnel, "private-key", own, "listen-port", PORT, "peer", tool("wg", "pubkey", input=keys[1 - index]),
                   "endpoint", f"{other.address}:{PORT}", "allowed-ips", f"10.99.0.{other.index + 1}/32"]
        deadline = time.monotonic() + 20
        while True:  # the daemon needs a moment
            try:
                host.do(*setting)
                break
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        host.do("ip", "address", "add", f"10.99.0.{index + 1}/24", "dev", tunnel)
        host.do("ip", "link", "set", tunnel, "up")


def job(net, network, kind):
    nodes = [host.start([TESSERA, "launch", "-n", 2, "--nnodes", 2, "--node-rank", host.index, "--rdzv-endpoint", f"{network}.1:29500",
                         TESSERA, "test"], env={"GLOO_SOCKET_IFNAME": kind.format(host.index), "TESSERA_SECRET": "sesame", "OMP_NUM_THREADS": 1},
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for host in net.hosts]
    for node in nodes:
        said = node.communicate(timeout=250)[0]
        if node.returncode != 0:
            raise SystemExit(f"the job over {kind} fails:\n{said}")


def main():
    hosts.enter()
    tool("wireguard-go", "--version")
    with hosts.Hosts(2) as net:
        sniffer = Sniffer(net[0].port)
        job(net, "10.77.0", "eth0")
        open_link, sniffer.seen = sniffer.seen, {}
        dig(net)
        job(net, "10.99.0", "wg{}")
        print(f"without the tunnel: {open_link}; through it: {sniffer.seen}")
        through = sniffer.seen.get(f"udp {PORT}", 0)
        if open_link.get("tcp", 0) < 100 or through < 100 or set(sniffer.seen) - {f"udp {PORT}", "icmp", "igmp"}:
            raise SystemExit("that is not what a tunnel shows")
    print("all packets went through the tunnel")


main()
