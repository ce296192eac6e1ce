"""Makes the folder of a recorded run, as `tessera launch --record` leaves it: a schedule of gathered units on ranks whose clocks and speeds are given."""
import json
import pathlib


def make_run(folder, world=4, steps=60, slow=None, large=None, hosts=None, ahead=None, units=("embed", *(f"layers.{i}" for i in range(8)), "head"), keep=4,
             status="done", program="llama"):
    """slow: {rank: factor of its computing}; large: a unit of 25 times the size; hosts: of each rank; ahead: {host: seconds by which its clock is ahead}."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    started, hosts, slow, ahead = 1764500000.0, hosts or ["alpha"] * world, slow or {}, ahead or {}
    size = {unit: 100e6 if unit == large else 4e6 for unit in units}
    seconds = {unit: 0.005 + size[unit] / 2e9 for unit in units}  # of a gather
    traces, lines, now, sequence = [[] for _ in range(world)], [[] for _ in range(world)], [0.5] * world, 0

    def event(rank, category, name, begin, end, tid=0, **args):
        shift = ahead.get(hosts[rank], 0)
        traces[rank].append({"ph": "X", "pid": rank, "tid": tid, "cat": category, "name": name, "ts": (begin + shift) * 1e6, "dur": (end - begin) * 1e6, "args": args})

    def collective(operation, unit, begins):
        nonlocal sequence
        sequence += 1
        end = max(begins) + seconds[unit]
        for rank, begin in enumerate(begins):
            event(rank, "collective", operation, begin, end, 1, operation=operation, unit=unit, group="world", sequence=sequence, bytes=size[unit] * (world - 1) / world)
        return end

    def one_pass(name, order, time, sums):
        begins, begun = list(now), list(now)
        free = list(now)  # when the communication of a rank has time for another operation
        reduced = [0.0] * world
        for i, unit in enumerate(order):
            end = collective("all_gather", unit, [max(a, b) for a, b in zip(begun, free)])
            free = [end] * world
            for rank in range(world):
                begun[rank] = now[rank] = max(now[rank], begun[rank])
                if end > now[rank]:
                    event(rank, "unshard", unit, now[rank], end, unit=unit)
                    sums[rank]["unshard"] += end - now[rank]
                    now[rank] = end
                begun[rank] = now[rank]  # the next unit is gathered while this one computes
                took = time * slow.get(rank, 1)
                event(rank, "unit", unit, now[rank], now[rank] + took, **{"pass": name})
                traces[rank].append({"ph": "C", "pid": rank, "name": "memory", "ts": (now[rank] + ahead.get(hosts[rank], 0)) * 1e6,
                                     "args": {"process": 600e6 + 5 * i * 1e6, "unsharded": size[unit] + (size[order[i + 1]] if i + 1 < len(order) else 0), "gradients": 20e6}})
                now[rank] += took
                sums[rank]["compute"] += took
            if name == "backward":
                end = collective("reduce_scatter", unit, [max(a, b) for a, b in zip(now, free)])
                free, reduced = [end] * world, [end] * world
        for rank in range(world):
            if reduced[rank] > now[rank]:
                event(rank, "reduce", order[-1], now[rank], reduced[rank], unit=order[-1])
                sums[rank]["reduce"] += reduced[rank] - now[rank]
                now[rank] = reduced[rank]
            event(rank, "pass", name, begins[rank], now[rank])

    sums = None
    for step in range(1, steps + 1):
        if (step - 1) % 5 == 0:
            line_began = list(now)
            sums = [dict.fromkeys(("compute", "unshard", "reduce", "optimizer", "other"), 0.0) for _ in range(world)]
        if step == steps - keep:
            traces = [[] for _ in range(world)]
        one_pass("forward", list(units), 0.02, sums)
        one_pass("backward", list(reversed(units)), 0.04, sums)
        for rank in range(world):
            event(rank, "optimizer", "step", now[rank], now[rank] + 0.02)
            now[rank] += 0.021
            sums[rank]["optimizer"] += 0.02
            sums[rank]["other"] += 0.001
            if step % 5 == 0 or step == steps:
                n = (step - 1) % 5 + 1
                lines[rank].append({"time": started + now[rank], "step": step, "steps": n, "seconds": now[rank] - line_began[rank], **sums[rank], "host": hosts[rank],
                                    "memory": {"process": 600e6 + 1e6 * rank, "shards": 40e6, "unsharded": 2 * max(size.values()), "gradients": 20e6, "optimizer": 80e6},
                                    "gathers": 2 * n * len(units), "reductions": n * len(units), "gathered_bytes": 2 * n * sum(size.values()),
                                    "misses": len(units) if step <= 5 else 0, "cancelled": 0, "place": "step"})
    facts = {"format": 1, "program": program, "command": [f"./{program}", "--epochs", "1"], "world": world, "hosts": hosts, "engine": "shm", "started": started,
             "ended": started + max(now) if status == "done" else None, "status": status, "flops_per_step": 4.5e11, "peak_flops": 1e12,
             "units": [{"name": unit, "parameters": size[unit] / 4, "unsharded": size[unit], "shard": size[unit] / world, "dtype": "Float", "residence": "gathered", "depth": 1} for unit in units]}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 2.5 / step**0.3, "lr": 1e-3 * min(1, step / 10), "samples/s": 120.5 + step % 7}) + "\n" for step in range(1, steps + 1)))
    for rank in range(world):
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[rank]))
        names = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}] + [
            {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in enumerate(("program", "communication"))]
        (folder / f"trace-{rank}.json").write_text(json.dumps({"traceEvents": names + traces[rank]}))
    return folder
