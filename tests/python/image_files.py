"""image_files.py FOLDER: pictures in the kinds of JPEG, PNG and WebP that there are, and in expected.safetensors the pixels that Pillow reads from the file of
each name, {height, width, 3}. Those of turned-... have an orientation, and the pixels that are turned by it. Ends with status 3 without the package."""
import io
import re
import struct
import sys
import zlib

import numpy
from safetensors.numpy import save_file

try:
    from PIL import Image, ImageOps, features
except ImportError:
    sys.exit(3)

random = numpy.random.default_rng(1)
folder = sys.argv[1]
expected = {}


def keep(name, data):
    with open(f"{folder}/{name}", "wb") as file:
        file.write(data)
    picture = Image.open(io.BytesIO(data))
    if name.startswith("turned-"):
        picture = ImageOps.exif_transpose(picture)
    expected[name] = numpy.ascontiguousarray(picture.convert("RGB"))


def drawn(height, width, channels, mode):
    """Waves with noise, which all frequencies are in."""
    y, x = numpy.mgrid[:height, :width]
    waves = numpy.stack([60 * numpy.sin(x / 7 + i) + 60 * numpy.cos(y / 5 - i) + 128 for i in range(channels)], -1)
    values = numpy.clip(waves + random.normal(0, 20, waves.shape), 0, 255).astype(numpy.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode=mode)


def packed(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def with_factors(data, factors):
    """A JPEG whose first component has other sampling factors: of the same number of blocks, so that it stays one."""
    place = re.search(rb"\xff[\xc0\xc2]\x00[\x11\x0b]\x08", data).start() + 11
    return data[:place] + bytes([factors]) + data[place + 1:]


def jpegs():
    for height, width in ((7, 5), (67, 101), (64, 96)):
        for subsampling, name in enumerate(("444", "422", "420")):
            for progressive in (False, True):
                data = packed(drawn(height, width, 3, "RGB"), "JPEG", quality=80, subsampling=subsampling, progressive=progressive)
                kind = f"{height}-{width}-{'progressive' if progressive else 'baseline'}"
                keep(f"{name}-{kind}.jpg", data)
                if height == 64:
                    for factors in {"444": (), "422": (0x12,), "420": (0x41, 0x14)}[name]:
                        keep(f"{factors:x}-{kind}.jpg", with_factors(data, factors))
    grey = packed(drawn(67, 101, 1, "L"), "JPEG")
    keep("grey.jpg", grey)
    keep("grey-22.jpg", with_factors(grey, 0x22))
    keep("restarts.jpg", packed(drawn(67, 101, 3, "RGB"), "JPEG", restart_marker_rows=1))
    keep("rgb.jpg", packed(drawn(67, 101, 3, "RGB"), "JPEG", keep_rgb=True))
    cmyk = packed(drawn(67, 101, 4, "CMYK"), "JPEG")
    keep("cmyk.jpg", cmyk)
    adobe = cmyk.index(b"Adobe")
    keep("ycck.jpg", cmyk[: adobe + 11] + b"\2" + cmyk[adobe + 12:])
    keep("cmyk-of-nobody.jpg", cmyk[:adobe] + b"other" + cmyk[adobe + 5:])
    keep("more-behind-it.jpg", grey + b"more")
    keep("a-jpeg.png", grey)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, color, interlaced, chunks):
    """A PNG of noise, whose rows have all filters."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)] if interlaced else [(0, 0, 1, 1)]
    rows = b""
    for left, top, right, down in passes:
        across, along = -(-(width - left) // right), -(-(height - top) // down)
        for _ in range(along if across > 0 else 0):
            row = random.integers(0, 256, (across * channels * depth + 7) // 8, dtype=numpy.uint8)
            if (color, depth) == (0, 16):  # values on both sides of 255
                row[::2] *= random.integers(0, 2, row[::2].size, dtype=numpy.uint8)
            rows += bytes([random.integers(0, 5)]) + row.tobytes()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + header + chunks + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def pngs():
    transparent = {0: b"\0\1", 2: b"\0\1\0\2\0\3", 3: b"\0\x80"}
    for color, depths in ((0, (1, 2, 4, 8, 16)), (2, (8, 16)), (3, (1, 2, 4, 8)), (4, (8, 16)), (6, (8, 16))):
        for depth in depths:
            for interlaced in (0, 1):
                for width, height in ((1, 1), (37, 19)):
                    # The last colours of the palette are missing.
                    palette = chunk(b"PLTE", random.integers(0, 256, 3 * (1 << depth) - 3, dtype=numpy.uint8).tobytes()) if color == 3 else b""
                    before = chunk(b"gAMA", struct.pack(">I", 45455)) + palette
                    name = f"{color}-{depth}-{width}-{interlaced}"
                    keep(f"{name}.png", png(width, height, depth, color, interlaced, before))
                    if color in transparent:
                        keep(f"{name}-transparent.png", png(width, height, depth, color, interlaced, before + chunk(b"tRNS", transparent[color])))
    keep("quantized.png", packed(drawn(67, 101, 3, "RGB").quantize(17), "PNG"))


def webps():
    for mode, channels in (("RGB", 3), ("RGBA", 4)):
        for lossless in (False, True):
            keep(f"{mode}-{'lossless' if lossless else 'lossy'}.webp", packed(drawn(67, 101, channels, mode), "WEBP", lossless=lossless))


def turned(kind):
    for orientation in range(1, 10):  # 9 is none
        exif = Image.Exif()
        exif[0x010F] = "maker"
        exif[0x0112] = orientation
        keep(f"turned-{orientation}.{kind}", packed(drawn(13, 24, 3, "RGB"), kind, exif=exif))
    keep(f"turned-nowhere.{kind}", packed(drawn(13, 24, 3, "RGB"), kind))


jpegs()
pngs()
turned("jpeg")
turned("png")
if features.check("webp"):
    webps()
    turned("webp")
save_file(expected, f"{folder}/expected.safetensors")
