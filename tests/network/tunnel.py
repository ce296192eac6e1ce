"""A job on two hosts through the tunnel of SECURITY.md: on the link between the hosts there are only the tunnel's packets.

tunnel.py BUILD_BIN
"""
import pathlib
import socket
import struct
import subprocess
import sys
import threading

import hosts
from jobs import Process, expect, tools_at, wait_until

TESSERA = tools_at(sys.argv[1]) / "tessera"
PORT, TUNNEL = 51820, "wg0"


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
        host.do("mount", "-t", "tmpfs", "run", "/var/run")  # where wireguard-go has its socket: else in this machine's own folder, for all hosts
        host.start(["wireguard-go", "-f", TUNNEL], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        own = net.folder / f"key{index}"
        own.touch(mode=0o600)
        own.write_text(keys[index])
        other = net.hosts[1 - index]
        wait_until(lambda: subprocess.run(host.inside(["wg", "show", TUNNEL]), capture_output=True).returncode == 0, 20, f"{host.name} has a tunnel")
        host.do("wg", "set", TUNNEL, "private-key", own, "listen-port", PORT, "peer", tool("wg", "pubkey", input=keys[1 - index]),
                "endpoint", f"{other.address}:{PORT}", "allowed-ips", f"10.99.0.{other.index + 1}/32")
        host.do("ip", "address", "add", f"10.99.0.{index + 1}/24", "dev", TUNNEL)
        host.do("ip", "link", "set", TUNNEL, "up")


def job(net, network, interface):
    nodes = [Process(host, [TESSERA, "launch", "-n", 2, "--nnodes", 2, "--node-rank", host.index, "--rdzv-endpoint", f"{network}.1:29500", TESSERA, "test"],
                     net.folder / f"{interface}-{host.index}.log", GLOO_SOCKET_IFNAME=interface, TESSERA_SECRET="sesame") for host in net]
    for node in nodes:
        expect(node.end(250) == 0, f"the job over {interface} fails:\n{node.said()}")


def main():
    hosts.enter()
    tool("wireguard-go", "--version")
    if not pathlib.Path("/dev/net/tun").exists():
        hosts.skip("there is no /dev/net/tun, which wireguard-go needs")
    with hosts.Hosts(2) as net:
        without = Sniffer(net[0].port)
        job(net, "10.77.0", "eth0")
        dig(net)
        through = Sniffer(net[0].port)
        job(net, "10.99.0", TUNNEL)
        print(f"without the tunnel: {without.seen}; through it: {through.seen}")
        expect(without.seen.get("tcp", 0) >= 100 and through.seen.get(f"udp {PORT}", 0) >= 100, "too few packets were seen")
        expect(not set(through.seen) - {f"udp {PORT}", "icmp", "igmp"}, "not all packets went through the tunnel")
    print("all packets went through the tunnel")


main()
