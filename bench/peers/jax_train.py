"""Measures training steps of gpt and mlp in JAX: GSPMD shards parameters, moments and batches over devices of one process."""
import os
import sys
import time

import measure

options = measure.flags(["jax"])
devices = int(os.environ.get("JAX_DEVICES", "2"))
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

dtype = jnp.bfloat16 if options.dtype == "bf16" else jnp.float32
mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
random = np.random.default_rng(0)


def weights(*shape):
    return jnp.asarray(random.normal(0, 0.02, shape), jnp.float32)


def linear(a, b):
    return {"w": weights(a, b), "b": jnp.zeros(b)}


def apply(layer, x):
    return x @ layer["w"].astype(dtype) + layer["b"].astype(dtype)


def norm(layer, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["w"].astype(dtype) + layer["b"].astype(dtype)


if options.model == "mlp":
    width, layers, per_device = options.width or 2048, options.layers or 8, 32
    parameters = {"units": [linear(width, width) for _ in range(layers)], "head": linear(width, 16)}

    def scores_of(p, x):
        x = x.astype(dtype)
        for unit in p["units"]:
            x = jax.nn.relu(apply(unit, x))
        return apply(p["head"], x).astype(jnp.float32)

    def batch(count):
        return jnp.asarray(random.normal(size=(count, width)), jnp.float32), jnp.asarray(random.integers(0, 16, count))
elif options.model == "gpt":
    vocabulary, length, heads, per_device = 8192, 256, 8, 4
    width, layers = options.width or 512, options.layers or 8

    def flat(n):
        return {"w": jnp.ones(n), "b": jnp.zeros(n)}

    parameters = {"tokens": weights(vocabulary, width), "positions": weights(length, width), "norm": flat(width),
                  "head": weights(width, vocabulary),
                  "units": [{"norm1": flat(width), "qkv": linear(width, 3 * width), "out": linear(width, width), "norm2": flat(width),
                             "up": linear(width, 4 * width), "down": linear(4 * width, width)} for _ in range(layers)]}

    def scores_of(p, ids):
        x = (p["tokens"][ids] + p["positions"][None]).astype(dtype)
        for unit in p["units"]:
            parts = apply(unit["qkv"], norm(unit["norm1"], x))
            q, k, v = jnp.moveaxis(parts.reshape(*parts.shape[:2], 3, heads, width // heads), 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + apply(unit["out"], mixed.reshape(x.shape))
            x = x + apply(unit["down"], jax.nn.gelu(apply(unit["up"], norm(unit["norm2"], x)), approximate=False))
        return (norm(p["norm"], x) @ p["head"].astype(dtype)).astype(jnp.float32)

    def batch(count):
        ids = random.integers(0, vocabulary, (count, length + 1))
        return jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:])
else:
    sys.exit(f"jax_train.py has no {options.model}")


def loss_of(p, inputs, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores_of(p, inputs)), targets[..., None], -1).mean()


def step(p, first, second, number, inputs, targets):
    loss, gradient = jax.value_and_grad(loss_of)(p, inputs, targets)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    def update(p, m, v):
        return (p * (1 - 1e-6) - 1e-4 * (m / (1 - 0.9**number)) / (jnp.sqrt(v / (1 - 0.999**number)) + 1e-8)).astype(p.dtype)
    return jax.tree.map(update, p, first, second), first, second, loss


def sharding(a):
    return NamedSharding(mesh, PartitionSpec("d") if a.ndim and a.shape[0] % devices == 0 and a.size > 4096 else PartitionSpec())


if options.narrow_parameters:
    parameters = jax.tree.map(lambda p: p.astype(dtype), parameters)
places = jax.tree.map(sharding, parameters)
parameters = jax.device_put(parameters, places)
first, second = (jax.device_put(jax.tree.map(jnp.zeros_like, parameters), places) for _ in range(2))
batches = NamedSharding(mesh, PartitionSpec("d"))
compiled = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(places, places, places, NamedSharding(mesh, PartitionSpec())))
times, processor_times = [], []
for number in range(options.warmup + options.steps):
    inputs, targets = (jax.device_put(a, batches) for a in batch((options.batch or per_device) * devices))
    jax.block_until_ready((inputs, targets))
    begin, processor_begin = time.perf_counter(), time.process_time()
    parameters, first, second, loss = compiled(parameters, first, second, jnp.float32(number + 1), inputs, targets)
    jax.block_until_ready((parameters, loss))
    if number >= options.warmup:
        times.append(time.perf_counter() - begin)
        processor_times.append(time.process_time() - processor_begin)
    if number == 0:
        print("first step done", file=sys.stderr, flush=True)
measure.row(options, devices, times, measure.own_megabytes(), float(loss), processor_ms=1e3 * min(processor_times))
