"""libtorch's own database of operators: each operator's samples on the device `xla` against the CPU, values and gradients.

operators.py BRIDGE [--whole] [--topology NAME] [--table PAGE] [NAME...]

BRIDGE is the library that makes the device. NAME chooses operators; otherwise some are run, or all with --whole. With a topology the programs of
lowered operators are compiled for TPUs, too. PAGE has the table of what is lowered: with --whole it must say what was found, and is written if
TESSERA_TEST_WRITE_PAGES is in the environment; otherwise nothing that was found may be worse than what it says.
"""
import argparse
import copy
import faulthandler
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import types
import warnings

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_map

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "bool": torch.bool}
# Of a number, and absolutely. bf16 has 8 bits, and its sums are rounded at other places.
TOLERANCES = {torch.float64: (1e-5, 1e-5), torch.float32: (2e-4, 2e-5), torch.bfloat16: (4e-2, 4e-2), torch.float16: (1e-2, 1e-2)}
TIES = re.compile("kthvalue|topk|n?a?n?median|mode")  # which of equal values is named is open
UNSTABLE = re.compile("sort|argsort|msort$")  # so is the order of equal values, which libtorch keeps if they are few
FEW = 1000
SAMPLES = {"quick": 2, "whole": 6}
# For every run: of each kind of lowering some.
QUICK = """
    abs add sub mul div (floor_rounding) remainder pow nan_to_num copysign logaddexp xlogy eq where clamp masked_fill nn.functional.gelu
    nn.functional.elu nn.functional.hardswish nn.functional.glu nn.functional.prelu nn.functional.logsigmoid sum prod argmax amin var
    linalg.vector_norm softmax log_softmax nn.functional.huber_loss nn.functional.binary_cross_entropy nn.functional.cross_entropy
    nn.functional.multilabel_margin_loss nn.functional.ctc_loss nn.functional.layer_norm nn.functional.group_norm nn.functional.instance_norm
    nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.unfold nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.interpolate (bicubic) nn.functional.pad (reflect) gather scatter_reduce (amax) index_put
    index_add index_fill masked_scatter sort topk median searchsorted cumsum cumprod cummax logcumsumexp tril roll arange addmm matmul
    nn.functional.embedding nn.functional.embedding_bag nn.functional.scaled_dot_product_attention cdist normal nn.functional.dropout
    view_as_real unfold _foreach_addcdiv
"""
# Lists of places that must be on the CPU; sparse results; storages that a copy to the device has not.
LEFT_OUT = re.compile(r"_refs\.|sparse\.|jiterator_|tensor_split$|to_sparse$|as_strided \(partial_views\)$")
# So that libtpu looks for no TPU, and does not speak.
TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
                   "TPU_WORKER_ID": "0", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
TPU_SECONDS = 300  # for one program
UNWRITTEN = re.compile("(new_)?empty(_like|_strided|_permuted)?$")  # results have no values


class Device:
    """What the bridge makes, in the one process that has it."""

    def __init__(self, bridge):
        torch.ops.load_library(bridge)
        self.ops = torch.ops.tessera_xla
        self.ops.make_device()
        module = types.ModuleType("xla")  # what torch asks of each device
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module._is_in_bad_fork = lambda: False
        module.manual_seed_all = lambda seed: None  # the library has done it
        torch._register_device_module("xla", module)
        self.name = torch.empty(0, device="privateuseone").device

    def fallbacks(self):
        return dict(self.ops.fallbacks())


def tensors_of(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class Call:
    """One sample on one device: what it makes of its arguments."""

    def __init__(self, operator, variant, sample, device, with_gradient, seed=0):
        known = {}

        def moved(leaf):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    own = leaf.detach().to(device) if device else leaf.detach().clone()
                    known[id(leaf)] = own.requires_grad_(leaf.requires_grad and with_gradient)
                return known[id(leaf)]
            return leaf

        tree = tree_map(moved, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        if "device" in tree[2]:
            tree[2]["device"] = device or torch.device("cpu")
        self.leaves = [leaf for leaf in known.values() if leaf.requires_grad]
        torch.manual_seed(seed)
        first, args, kwargs = tree
        if variant == "in place":
            with torch.no_grad():
                self.results = tensors_of(operator.inplace_variant(first, *args, **kwargs))
        else:
            made = operator.op(first, *args, **kwargs)
            self.results = tensors_of(sample.output_process_fn_grad(made) if with_gradient else made)
        self.gradients = []
        if with_gradient:
            roots = [result for result in self.results if result.requires_grad]
            generator = torch.Generator().manual_seed(1)
            seeds = [torch.randn(root.shape, generator=generator, dtype=torch.float64).to(root.dtype).to(root.device) for root in roots]
            if roots and self.leaves:
                self.gradients = torch.autograd.grad(roots, self.leaves, seeds, allow_unused=True)

    def values(self):
        return [value.detach() for value in [*self.results, *[each for each in self.gradients if each is not None]]]


def is_plain(values):
    return all(value.layout == torch.strided and not value.is_complex() and not value.is_quantized for value in values)


def difference(expected, actual, errors=None):
    """Nothing, or how the two lists of tensors differ; `errors` has what is allowed more for each. Results behind the first may be wider."""
    if len(expected) != len(actual):
        return f"{len(actual)} tensors, not {len(expected)}"
    for i, (theirs, ours) in enumerate(zip(expected, actual)):
        relative, absolute = TOLERANCES.get(theirs.dtype, (0, 0))
        try:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=relative, atol=absolute + (errors[i] if errors else 0), equal_nan=True,
                                       check_dtype=i == 0)
        except AssertionError as error:
            return f"tensor {i} of {len(expected)}: " + " ".join(str(error).split())
    return None


def rounding_errors(operator, variant, sample, with_gradient, expected):
    """How far the CPU is from what it makes of doubles, some times over: there no other rounding can be called wrong."""
    def doubled(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return torch.float64 if leaf in (torch.float32, torch.bfloat16) else leaf

    exact = copy.copy(sample)
    exact.input, exact.args, exact.kwargs = tree_map(doubled, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    try:
        values = Call(operator, variant, exact, None, with_gradient).values()
        return [4 * (theirs.double() - value.double()).nan_to_num(0, 0, 0).abs().max().item() if theirs.is_floating_point() and theirs.numel() else 0
                for theirs, value in zip(expected, values, strict=True)]
    except Exception:
        return None


class Found:
    """What was found of an operator."""

    def __init__(self, name):
        self.name = name
        self.dtypes = []
        self.fallbacks = set()
        self.reads = False  # whether the host asked for values on the way
        self.failures = []
        self.programs = {}  # files, by what was tested
        self.on_tpu = ""  # as the table says it

    def place(self):
        """As the table says it."""
        if self.fallbacks:
            return "on the CPU: " + ", ".join(f"`{name.removeprefix('aten::')}`" for name in sorted(self.fallbacks))
        return "yes, but the host reads values" if self.reads else "yes"

    def row(self):
        return f"| `{self.name}` | {self.place()} | {' '.join(self.dtypes)} | {self.on_tpu} |"


def samples_of(operator, dtype, with_gradient, count):
    """The first and the last of them and some between."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_samples = list(operator.sample_inputs("cpu", dtype, requires_grad=with_gradient))
    if len(all_samples) <= count:
        return all_samples
    return [all_samples[i * (len(all_samples) - 1) // max(count - 1, 1)] for i in range(count)]


def expected_of(operator, variant, sample, with_gradient):
    """What the CPU makes of it, or None if it can't be compared; and whether its values are drawn."""
    try:
        call = Call(operator, variant, sample, None, with_gradient)
        again = Call(operator, variant, sample, None, with_gradient, seed=1)
    except Exception:  # what the CPU refuses is no matter here
        return None, False
    values = call.values()
    if UNSTABLE.match(operator.name) and sample.input.numel() > FEW and not sample.kwargs.get("stable") and \
            sample.input.unique().numel() < sample.input.numel():
        return None, False
    if not is_plain([*values, *tensors_of((sample.input, sample.args, sample.kwargs))]):
        return None, False
    drawn = bool(UNWRITTEN.match(operator.name)) or difference(values, again.values()) is not None
    return values, drawn


def compare(device, operator, variant, dtype, with_gradient, count, found):
    """Whether at least one sample could be compared. All samples become one program."""
    cases = []
    for sample in samples_of(operator, dtype, with_gradient, count):
        if variant == "in place" and sample.broadcasts_input:
            continue  # its result has no room there
        expected, drawn = expected_of(operator, variant, sample, with_gradient)
        if expected is not None:
            cases.append((sample, expected, drawn))
    label = f"{operator.name}{'.' + operator.variant_test_name if operator.variant_test_name else ''} {variant} {dtype}"

    def fail(sample, text):
        found.failures.append(f"{label}: {text[:600]}\n    of {str(sample.summary())[:400]}")

    def run(sample):
        return Call(operator, variant, sample, device.name, with_gradient).values()

    results = []
    for sample, expected, drawn in cases:
        before = device.ops.executions(), device.fallbacks()
        try:
            results.append(run(sample))
            found.reads |= device.ops.executions() != before[0] and device.fallbacks() == before[1]
        except Exception as error:
            results.append(None)
            fail(sample, f"{type(error).__name__}: {' '.join(str(error).split())}")
    try:
        device.ops.step_boundary()
    except Exception:
        results = []  # one of the samples: each by itself
        for sample, *_ in cases:
            try:
                results.append(run(sample))
                device.ops.step_boundary()
            except Exception as error:
                results[-1] = None
                fail(sample, f"{type(error).__name__}: {' '.join(str(error).split())}")
    for (sample, expected, drawn), actual in zip(cases, results):
        if actual is None:
            continue
        if not all(value.device == device.name for value in actual):
            continue
        if TIES.match(operator.name):
            expected, actual = expected[:1], actual[:1]
        if drawn:
            wrong = [value.shape for value in actual] != [value.shape for value in expected] or \
                [value.dtype for value in actual] != [value.dtype for value in expected]
            if wrong:
                fail(sample, "another shape or type")
            continue
        text = difference(expected, actual)
        if text and dtype.is_floating_point:
            text = difference(expected, actual, rounding_errors(operator, variant, sample, with_gradient, expected))
        if text:
            fail(sample, text)
    return bool(cases)


def examine(device, operator, name, whole):
    found = Found(name)
    before = device.fallbacks()
    count = SAMPLES["whole" if whole else "quick"]

    def compare_programs(label, *arguments):
        runs = device.ops.runs_of_programs()
        compared = compare(device, operator, *arguments, count, found)
        files = [f"{os.getpid()}_{i + 1}.mlir" for i, times in enumerate(device.ops.runs_of_programs()) if times > (runs[i] if i < len(runs) else 0)]
        found.programs[label] = files
        return compared

    for short, dtype in DTYPES.items():
        supported = operator.supported_dtypes("cpu")
        if dtype not in supported or (not whole and short != "f32" and torch.float32 in supported):
            continue
        backward = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
        if compare_programs(short, "", dtype, backward):
            found.dtypes.append(short)
        if whole and short == "f32" and operator.inplace_variant:
            compare_programs("in place", "in place", dtype, False)
    found.fallbacks = {fallen for fallen, calls in device.fallbacks().items() if calls > before.get(fallen, 0)}
    return found


def operators():
    """By their names."""
    chosen = {}
    lists = [database.op_db, database.foreach_unary_op_db, database.foreach_binary_op_db, database.foreach_pointwise_op_db,
             database.foreach_reduce_op_db, database.foreach_other_op_db]
    for operator in (each for one in lists for each in one):
        name = operator.name + (f" ({operator.variant_test_name})" if operator.variant_test_name else "")
        if not LEFT_OUT.match(name):
            chosen[name] = operator
    return chosen


def work(bridge, names, whole, connection):
    """In a process of its own: says which operator comes, and what was found of it."""
    faulthandler.enable()  # a crash says where it was
    all_operators = operators()
    device = Device(bridge)
    warnings.simplefilter("ignore")
    for name in names:
        connection.send(name)
        connection.send(examine(device, all_operators[name], name, whole))
    connection.send(None)


def run_all(bridge, names, whole):
    """In processes that end after a while, because programs stay in memory, and may end early where an operator crashes."""
    results = []
    fork = multiprocessing.get_context("fork")
    while names:
        here, there = fork.Pipe()
        process = fork.Process(target=work, args=(bridge, names[:60], whole, there))
        process.start()
        there.close()
        current = None
        try:
            while (message := here.recv()) is not None:
                if isinstance(message, str):
                    current = message
                else:
                    results.append(message)
                    current = None
                    report(message)
        except EOFError:
            process.join()
            if current is None:
                raise SystemExit(f"after {results[-1].name if results else 'nothing'} a process ended with {process.exitcode}") from None
            crashed = Found(current)
            crashed.failures.append(f"{current}: the process ended with {process.exitcode}")
            results.append(crashed)
            report(crashed)
        process.join()
        done = {result.name for result in results}
        names = [name for name in names if name not in done]
    return results


def compile_for_tpu(bridge, topology, files, connection):
    """In a process of its own: says why each is refused, or nothing."""
    os.environ.update(TPU_ENVIRONMENT)
    torch.ops.load_library(bridge)
    refusal = torch.ops.tessera_xla.tpu_refusal
    connection.send(refusal(topology, ""))
    for file in files:
        connection.send(refusal(topology, str(file)))


def refusals_of_tpu(bridge, topology, files):
    """Why the compiler for TPUs refuses each of the programs; empty if it does not. In processes that it may end."""
    fork = multiprocessing.get_context("fork")
    found = {}
    while waiting := [file for file in files if file not in found]:
        here, there = fork.Pipe()
        process = fork.Process(target=compile_for_tpu, args=(bridge, topology, waiting, there))
        process.start()
        there.close()
        try:
            here.recv()
        except EOFError:
            raise SystemExit(f"the compiler for {topology} can't be started") from None
        for file in waiting:
            if not here.poll(TPU_SECONDS):
                process.kill()
                found[file] = f"not compiled after {TPU_SECONDS} s"
                break
            try:
                found[file] = here.recv()
            except EOFError:
                process.join()
                found[file] = f"the compiler ends its process with {process.exitcode}"
                break
        process.join()
    return found


def in_short(refusal):
    """A line of the table."""
    lines = [line for line in refusal.splitlines() if line.strip()]
    text = re.sub(r"^.*?can't compile a program for a topology: ", "", lines[0]).replace("|", "\\|")
    return text if len(text) <= 160 else text[:157] + "..."


def compile_programs(bridge, topology, folder, results):
    """Says of each operator whether a TPU's compiler takes its programs."""
    texts = {}  # of equal programs one is compiled
    for result in results:
        for files in result.programs.values():
            files[:] = [texts.setdefault((folder / file).read_text(), folder / file) for file in files]
    refusals = refusals_of_tpu(bridge, topology, list(texts.values()))
    for result in results:
        reasons = {}
        for label, files in result.programs.items():
            for reason in dict.fromkeys(refusals[file] for file in files if refusals[file]):
                reasons.setdefault(in_short(reason), []).append(label)
        if result.fallbacks:
            result.on_tpu = "not lowered"
        elif not any(result.programs.values()):
            result.on_tpu = "needs no program"
        else:
            result.on_tpu = "; ".join(f"not {' '.join(labels)}: {reason}" for reason, labels in reasons.items()) or "yes"
        print(f"{result.name} for TPUs: {result.on_tpu}", flush=True)
    print(f"{len(texts)} programs compiled for {topology}, {sum(bool(text) for text in refusals.values())} refused", flush=True)


def report(found):
    for failure in found.failures:
        print("FAILED", failure, flush=True)
    print(found.row(), flush=True)


HEAD = """# Operators of XLA devices

libtorch's own database of operators, run on the device `xla` and on the CPU: values of up to six samples of each type, and gradients where
there are some. Operators with complex numbers, sparse tensors or nothing to compare are left out. What is "on the CPU" ends the program before it
(see [XLA devices](../xla.md)). This page is made from the tests: `TESSERA_TEST_WRITE_PAGES=1 ./check --long xla/operators_whole`.

| operator | lowered | tested types | compiled for TPU |
| --- | --- | --- | --- |
"""


def tpu_column(page):
    """What the page says of each operator's programs on TPUs."""
    rows = (line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `"))
    return {row[0].strip("`"): row[3] for row in rows if len(row) == 4}


def check_page(page, results, whole):
    """What is wrong with the page. It is written first where the environment says so."""
    tested = sorted((result for result in results if result.dtypes), key=lambda result: result.name.lower())
    if whole and os.environ.get("TESSERA_TEST_WRITE_PAGES"):
        page.write_text(HEAD + "".join(result.row() + "\n" for result in tested))
    lines = page.read_text().splitlines()
    if whole:
        missing = [result.row() for result in tested if result.row() not in lines]
        return [f"not on {page.name}: {row}" for row in missing] + ([f"{page.name} has other lines"] if len(lines) != len(HEAD.splitlines()) + len(tested) else [])
    # Some samples only: what the page says is lowered must be.
    return [f"{page.name} has it otherwise: {result.row()}" for result in tested if result.place() != "yes" and f"| `{result.name}` | yes |" in "\n".join(lines)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bridge")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--topology", help="such as v5p:1x1x1")
    parser.add_argument("--table", type=pathlib.Path)
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    known = operators()
    quick = re.findall(r"\S+(?: \(\S+\))?", QUICK)
    names = arguments.names or (list(known) if arguments.whole else quick)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"not in the database: {', '.join(unknown)}")
    if arguments.topology:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TESSERA_XLA_PROGRAMS"] = folder
            results = run_all(arguments.bridge, names, arguments.whole)
            compile_programs(arguments.bridge, arguments.topology, pathlib.Path(folder), results)
    else:
        results = run_all(arguments.bridge, names, arguments.whole)
        known_on_tpu = tpu_column(arguments.table) if arguments.table else {}
        for result in results:
            result.on_tpu = known_on_tpu.get(result.name, "")
    failed = [result.name for result in results if result.failures]
    wrong = check_page(arguments.table, results, arguments.whole) if arguments.table else []
    for line in wrong:
        print(line)
    lowered = sum(result.place() == "yes" for result in results if result.dtypes)
    print(f"{len(results)} operators, {sum(bool(result.dtypes) for result in results)} tested, {lowered} lowered, {len(failed)} failed: {', '.join(failed)}")
    sys.exit(bool(failed or wrong))


if __name__ == "__main__":
    main()
