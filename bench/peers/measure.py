"""Code common to all peers: their flags, and the row that they print."""
import argparse
import json
import statistics


def flags(systems):
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=systems, default=systems[0])
    parser.add_argument("--model", choices=["gpt", "llama", "mixtral", "mlp", "cnn", "resnet50", "vit"], default="mlp")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    for name, default in (("steps", 12), ("warmup", 4), ("batch", 0), ("width", 0), ("layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", type=int, default=8, help="of the gpt in torch_train.py")
    parser.add_argument("--length", type=int, default=256, help="of the gpt in torch_train.py, in tokens")
    parser.add_argument("--device", default="cpu", help="in torch_train.py: such as cuda")
    parser.add_argument("--lora", action="store_true", help="in torch_train.py, for llama: train only adapters of peft")
    parser.add_argument("--narrow-parameters", action="store_true", help="parameters, gradients and the optimizer's state in --dtype, too")
    return parser.parse_args()


def own_megabytes():
    """The memory of this process, with its share of shared memory (PSS)."""
    return next(int(line.split()[1]) * 1024 / 1e6 for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))


def row(options, world, times, megabytes, loss, **more):
    print(json.dumps({"system": options.system, "model": options.model, "dtype": options.dtype, "world": world,
                      "median_ms": 1e3 * statistics.median(times), "min_ms": 1e3 * min(times), "pss_mb": megabytes, "loss": loss, **more}),
          flush=True)
