#!/usr/bin/env python3
"""Cuts a small set of golden vectors out of the full one: select_goldens.py SOURCE DESTINATION

SOURCE holds mlx-cuda/*.safetensors and mlx-cpu/*.safetensors. Output columns and rows of a quantized
product do not depend on each other, so cutting N and M leaves every kept value what MLX computed.
Needs Python 3.9 alone. The same source gives the same bytes.
"""
import json
import struct
import sys
from pathlib import Path

CUDA_COLUMNS = 14
# Cases of mlx-cpu by number: rows (M) and columns (N) to keep; None keeps all.
CPU_CASES = {
    0: (5, 6), 3: (5, 6), 7: (5, 6), 10: (5, 6),  # main: 4/4 and 4/8 bits
    14: (None, None), 16: (33, 7), 17: (1, 12), 18: (7, 6), 24: (3, 8), 31: (None, None),
    33: (7, 8), 36: (2, 4), 37: (2, 4), 42: (2, 4), 48: (3, 8), 52: (6, 8), 58: (17, 4),
    60: (3, 6), 66: (1, 3), 69: (1, 20), 71: (17, 4),  # pairs
    72: (None, 5), 73: (None, 5), 74: (None, 5), 75: (None, 5), 76: (None, 5),
    77: (None, 5),  # one-hot rows: the outputs are the decoded weights
    78: (3, 20), 79: (3, 8), 84: (3, 20), 85: (3, 8),  # degenerate groups
    80: (7, 16), 86: (7, 16), 81: (None, 12), 87: (None, 12), 90: (None, 12),  # range
    82: (3, 6), 83: (3, 6), 88: (3, 6), 89: (3, 6),  # groups that differ
    91: (3, 5), 92: (5, 8), 93: (2, 3),  # f32
}
ELEMENT_BYTES = {"F64": 8, "F32": 4, "U32": 4, "BF16": 2, "F16": 2}


def read(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], raw[8 + size + begin:8 + size + end])
    return metadata, tensors


def write(path, metadata, tensors):
    # Wide elements first, so that each tensor is aligned for its type.
    order = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[tensors[name][0]], name))
    header, at = {"__metadata__": metadata}, 0
    for name in order:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name][2])


def cut(tensor, rows, columns):
    """The first rows and columns of a matrix; None keeps all."""
    dtype, (height, width), data = tensor
    step = ELEMENT_BYTES[dtype]
    rows = height if rows is None else min(rows, height)
    columns = width if columns is None else min(columns, width)
    kept = b"".join(data[r * width * step:(r * width + columns) * step] for r in range(rows))
    return dtype, [rows, columns], kept


def select_cuda(source, destination):
    for path in sorted(source.glob("qmm_*.safetensors")):
        metadata, tensors = read(path)
        kept = {}
        for name, tensor in tensors.items():
            part = name.rsplit(".", 1)[1]
            if part == "y":
                kept[name] = cut(tensor, None, CUDA_COLUMNS)
            elif part == "x":
                kept[name] = tensor
            else:
                kept[name] = cut(tensor, CUDA_COLUMNS, None)
        metadata["cut"] = f"first {CUDA_COLUMNS} output columns"
        write(destination / path.name, metadata, kept)
    for path in source.glob("activation_tables.safetensors"):
        (destination / path.name).write_bytes(path.read_bytes())


def select_cpu(source, destination):
    for number, (rows, columns) in CPU_CASES.items():
        path = next(source.glob(f"{number:03d}_*.safetensors"))
        metadata, tensors = read(path)
        kept = {}
        for name, tensor in tensors.items():
            if name == "x":
                kept[name] = cut(tensor, rows, None)
            elif name[:3] in ("wg_", "wu_"):
                kept[name] = cut(tensor, columns, None)
            else:
                kept[name] = cut(tensor, rows, columns)
        height, width = kept["gate"][1]
        metadata.update(M=str(height), I=str(width))
        write(destination / f"{number:03d}_{metadata['category']}.safetensors", metadata, kept)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    for folder, select in (("mlx-cuda", select_cuda), ("mlx-cpu", select_cpu)):
        (destination / folder).mkdir(parents=True, exist_ok=True)
        select(source / folder, destination / folder)


if __name__ == "__main__":
    main()
