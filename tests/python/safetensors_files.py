"""Reads a file of Tessera by Python's safetensors, checks every value, and writes the same tensors to a second file.

Of the tensor in bfloat16, which is no dtype of numpy's, only the bytes are checked; the second file is without it.
"""
import json
import sys

import numpy
import safetensors
import safetensors.numpy
import xxhash

ours, theirs = sys.argv[1:]
BFLOAT = "größe.BFloat16"
copies = {}
with safetensors.safe_open(ours, framework="numpy") as file:
    assert file.metadata()["format"] == "pt", file.metadata()
    names = set(file.keys())
    for name in names - {BFLOAT}:
        values = copies[name] = file.get_tensor(name)
        expected = {"scalar": numpy.float32(5), "empty": numpy.empty((4, 0))}.get(name, numpy.arange(6).reshape(2, 3))
        assert values.shape == expected.shape, (name, values.shape)
        assert (values == expected.astype(values.dtype)).all(), (name, values)
assert len(names) == 12 and BFLOAT in names, names
assert {str(copies[name].dtype) for name in copies} == {
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}, copies

with open(ours, "rb") as file:
    tensor = dict(safetensors.deserialize(file.read()))[BFLOAT]
assert tensor["dtype"] == "BF16" and list(tensor["shape"]) == [2, 3], tensor
# A bfloat16 is the upper half of a float32.
assert (numpy.frombuffer(bytes(tensor["data"]), "<u2").astype("<u4") << 16).view("<f4").tolist() == [0, 1, 2, 3, 4, 5], tensor

# The checksums, by the reference implementation: first the header's, as it is with zeros in their place, then the tensors' in the order of the data.
with open(ours, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length)
    header = json.loads(text)
    checksums = header.pop("__metadata__")["xxh3_64"]
    found = [xxhash.xxh3_64_hexdigest(text.replace(checksums.encode(), b"0" * len(checksums)))]
    for begin, end in sorted(tensor["data_offsets"] for tensor in header.values()):
        file.seek(8 + length + begin)
        found.append(xxhash.xxh3_64_hexdigest(file.read(end - begin)))
assert "".join(found) == checksums, (found, checksums)

safetensors.numpy.save_file(copies, theirs, {"written by": "python"})
