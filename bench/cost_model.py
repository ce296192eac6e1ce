"""What a training step takes on a cluster, by the latency and the bandwidth of its links. In seconds and bytes.

A rank sends through two links: `inner` to ranks of its host, and its host's one link `outer` to the network, which the ranks of the host share. Links
carry bytes in both directions at once. A message costs a rank `message` besides. Every operation begins with an agreement among its ranks.
"""
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Link:
    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    hosts: int
    ranks: int  # on each host
    inner: Link
    outer: Link
    message: float

    @property
    def size(self):
        return self.hosts * self.ranks


def turns(ranks):
    """Of an agreement: among three ranks or fewer all send to all, among others each sends to one rank at a time."""
    return 0 if ranks < 2 else 1 if ranks <= 3 else math.ceil(math.log2(ranks))


# --- collectives: an all-gather to, or a reduce-scatter of, a buffer of `size` bytes -------------------------------------------------------


def shared_memory(cluster, size):
    """Ranks of one host: each copies, or adds, what the others have."""
    return 2 * cluster.inner.latency + size * (cluster.ranks - 1) / cluster.ranks / cluster.inner.bandwidth


def one_level(cluster, size):
    """Every rank sends its part to every other rank, as Tessera does over gloo."""
    if cluster.hosts == 1:
        return shared_memory(cluster, size)
    part = size / cluster.size
    network = cluster.ranks * (cluster.size - cluster.ranks) * part / cluster.outer.bandwidth
    inside = (cluster.ranks - 1) * part / cluster.inner.bandwidth
    agreement = turns(cluster.size) * (cluster.outer.latency + cluster.message)
    return agreement + cluster.outer.latency + (cluster.size - 1) * cluster.message + max(network, inside)


def two_levels(cluster, size):
    """Every part crosses the network once for each other host; within the host it goes through shared memory."""
    if cluster.hosts == 1:
        return shared_memory(cluster, size)
    agreement = 2 * cluster.inner.latency + math.ceil(math.log2(cluster.hosts)) * (cluster.outer.latency + cluster.message)
    network = size * (cluster.hosts - 1) / cluster.hosts / cluster.outer.bandwidth
    return agreement + cluster.outer.latency + (cluster.hosts - 1) * cluster.message + network + shared_memory(cluster, size)


def into_shared_memory(cluster, size):
    """As two_levels, but the ranks of a host share what arrives, so nothing is copied within the host."""
    return two_levels(cluster, size) - shared_memory(cluster, size) if cluster.hosts > 1 else 0


def ring(cluster, size):
    """Rings as NCCL's, which together use the whole link of each host: each part passes all ranks."""
    if cluster.size == 1:
        return 0
    between = cluster.hosts if cluster.hosts > 1 else 0  # hops
    hops = between * cluster.outer.latency + (cluster.size - 1 - between) * cluster.inner.latency
    inside = size * (cluster.size - 1) / cluster.size / cluster.inner.bandwidth
    network = size * (cluster.hosts - 1) / cluster.hosts / cluster.outer.bandwidth
    return hops + (cluster.size - 1) * cluster.message + max(inside, network)


def tree(cluster, size):
    """An all-reduce up and down a binary tree, in pieces that follow one another."""
    hops = 2 * (math.ceil(math.log2(cluster.hosts)) * cluster.outer.latency + math.ceil(math.log2(cluster.ranks)) * cluster.inner.latency)
    return hops + 2 * size / min(cluster.inner.bandwidth, cluster.outer.bandwidth) if cluster.size > 1 else 0


def across_groups(cluster, size, groups, all_reduce):
    """An all-reduce of a rank's part among replicas: as many at a time as a group has ranks on a host, which share the host's link."""
    replicas = dataclasses.replace(cluster, hosts=groups, ranks=1, outer=Link(cluster.outer.latency, cluster.outer.bandwidth / cluster.ranks))
    return all_reduce(replicas, size)


# --- a step ------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How units are gathered and reduced; no gather where ranks share the parameters anyway."""

    gather: object
    reduce: object
    again: bool = True  # whether backward gathers, too


def hybrid(gather, reduce, all_reduce, hosts=1):
    """Groups of `hosts` hosts shard the model, and replicas of a part add up their gradients."""

    def group(cluster):
        return dataclasses.replace(cluster, hosts=min(hosts, cluster.hosts))

    def reduce_all(cluster, size):
        own = group(cluster)
        groups = cluster.hosts // own.hosts
        return reduce(own, size) + (across_groups(cluster, size / own.size, groups, all_reduce) if groups > 1 else 0)

    return Strategy(gather and (lambda cluster, size: gather(group(cluster), size)), reduce_all)


def on_hosts(width):
    """For values of `width` bytes; between hosts, the sums of two levels travel in float32."""

    def sums(cluster, size):
        return two_levels(cluster, size * (4 / width if cluster.hosts > 1 else 1))

    return {
        "one level": Strategy(one_level, one_level),
        "two levels": Strategy(two_levels, sums),
        "node-shared": Strategy(into_shared_memory, sums, again=False),
        "ZeRO-2": Strategy(two_levels, sums, again=False),
        "hybrid": hybrid(None, shared_memory, lambda cluster, size: 2 * one_level(cluster, size)),
    }


def best_all_reduce(cluster, size):
    return min(2 * ring(cluster, size), tree(cluster, size))


def on_devices():
    return {
        "full shard": Strategy(ring, ring),
        "ZeRO-2": Strategy(ring, ring, again=False),
        "hybrid of 8 hosts": hybrid(ring, ring, best_all_reduce, hosts=8),
        "hybrid": hybrid(ring, ring, best_all_reduce),
    }


class _Clock:
    """The time of a rank that computes, and of its queue, which runs one operation after the other."""

    def __init__(self, strategy, cluster):
        self.strategy, self.cluster = strategy, cluster
        self.now = self.queue = 0.0

    def start(self, operation, size):
        self.queue = max(self.queue, self.now) + operation(self.cluster, size)
        return self.queue

    def run(self, units, seconds, gathers, reduces):
        """A pass: the next unit is gathered while one computes, and a unit is reduced while the next computes."""
        ready, reduced = {}, 0.0
        for at, size in enumerate(units):
            for ahead in (at, at + 1):
                if ahead < len(units) and ahead not in ready:
                    ready[ahead] = self.start(self.strategy.gather, units[ahead]) if gathers(ahead) else self.now
            self.now = max(self.now, ready[at]) + seconds * size / sum(units)
            if reduces:
                self.now = max(self.now, reduced)
                reduced = self.start(self.strategy.reduce, size)
        self.now = max(self.now, reduced)


def step(strategy, cluster, units, compute, update=0):
    """Of a model with units of these sizes, in the order of forward. `compute`: forward and backward, which takes twice as long; `update`: the
    optimizer."""
    clock = _Clock(strategy, cluster)
    clock.run(units, compute / 3, lambda _: strategy.gather is not None, reduces=False)
    # The unit that forward has used last is still there.
    clock.run(units[::-1], compute * 2 / 3, lambda at: strategy.gather is not None and strategy.again and at > 0, reduces=True)
    return clock.now + update
