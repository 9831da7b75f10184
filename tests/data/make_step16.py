#!/usr/bin/env python3
"""Writes step16.safetensors, hard cases of one tensor-core step: make_step16.py DESTINATION

The results come from an integer model of the sm_90 instruction that was compared with an H200 on data
of these kinds (55,296 outputs, none different). Needs Python 3.9 alone; its integers are unbounded, so
nothing here can overflow. The same bytes on every run.
"""
import json
import random
import struct
import sys

NAN = 0x7FFFFFFF
CASES_PER_KIND = 130


def decode(u, half):
    """(kind, sign, significand, exponent of its last bit, top exponent) of a 16-bit pattern."""
    man_bits, bias, e_max = (10, 15, 31) if half else (7, 127, 255)
    sign, e, m = u >> 15, (u >> man_bits) & e_max, u & ((1 << man_bits) - 1)
    if e == e_max:
        return ("nan" if m else "inf", sign, 0, 0, 0)
    if e == 0:
        return ("finite" if m else "zero", sign, m, 1 - bias - man_bits, 1 - bias)
    return ("finite", sign, m | 1 << man_bits, e - bias - man_bits, e - bias)


def decode_f32(u):
    sign, e, m = u >> 31, (u >> 23) & 255, u & 0x7FFFFF
    if e == 255:
        return ("nan" if m else "inf", sign, 0, 0, 0)
    if e == 0:
        return ("finite" if m else "zero", sign, m, -149, -126)
    return ("finite", sign, m | 1 << 23, e - 150, e - 127)


def step16(a, b, acc, half):
    """a, b: 16 bit patterns each; acc: f32 bit pattern. Returns the result's f32 bit pattern."""
    terms, infinite, nan = [], set(), False
    for x, y in zip(a, b):
        p, q = decode(x, half), decode(y, half)
        kinds = (p[0], q[0])
        if "nan" in kinds or ("inf" in kinds and "zero" in kinds):
            nan = True
        elif "inf" in kinds:
            infinite.add(p[1] ^ q[1])
        elif "zero" not in kinds:
            terms.append((p[1] ^ q[1], p[2] * q[2], p[3] + q[3], p[4] + q[4]))
    c = decode_f32(acc)
    if c[0] == "nan":
        nan = True
    elif c[0] == "inf":
        infinite.add(c[1])
    elif c[0] == "finite":
        terms.append(c[1:])
    if nan or len(infinite) == 2:
        return NAN
    if infinite:
        return 0x7F800000 | infinite.pop() << 31
    if not terms:
        return 0
    last = max(t[3] for t in terms) - 25  # every term is cut toward zero at this bit
    total = 0
    for sign, m, e, _ in terms:
        v = m << (e - last) if e >= last else m >> (last - e)
        total += -v if sign else v
    if total == 0:
        return 0
    sign, total, e = int(total < 0), abs(total), last
    n = total.bit_length()
    if n > 24:
        total, e, n = total >> (n - 24), e + n - 24, 24
    top = e + n - 1
    if top > 127:
        return 0x7F800000 | sign << 31  # overflow: infinity
    if top < -126:  # subnormal: cut toward zero, not flushed
        shift = -149 - e
        total = total >> shift if shift > 0 else total << -shift
        return sign << 31 | total if total else 0
    return sign << 31 | (top + 127) << 23 | (total << (24 - n)) & 0x7FFFFF


def float16(rng, half, low, high):
    """A pattern whose exponent field lies in [low, high]."""
    man_bits = 10 if half else 7
    return rng.getrandbits(1) << 15 | rng.randint(low, high) << man_bits | rng.getrandbits(man_bits)


def float32(rng, low, high):
    return rng.getrandbits(1) << 31 | rng.randint(low, high) << 23 | rng.getrandbits(23)


def with_specials(rng, half, value):
    infinity = 0x7C00 if half else 0x7F80
    q = rng.randrange(41)
    if q == 0:
        return infinity
    if q == 1:
        return infinity | 0x8000
    if q == 2:
        return infinity | 1 | rng.getrandbits(7)
    return 0 if q < 8 else value


# kind: (half, exponents of a, of b, of acc, specials, chance of a zero acc)
KINDS = {
    "ordinary": (False, (118, 130), (110, 125), (110, 130), False, 0.3),
    "subnormal results": (False, (50, 66), (50, 66), (0, 3), False, 0.3),
    "subnormal operands": (False, (0, 0), (100, 253), (60, 150), False, 0.5),
    "near overflow": (False, (180, 194), (180, 194), (248, 254), False, 0.3),
    "specials": (False, (110, 130), (110, 130), (110, 130), True, 0.1),
    "huge": (False, (185, 250), (185, 250), (200, 254), False, 0.0),
    "wide": (False, (70, 180), (70, 180), (60, 200), False, 0.2),
    "f16 ordinary": (True, (10, 17), (8, 15), (110, 130), False, 0.3),
    "f16 specials": (True, (5, 25), (5, 25), (110, 130), True, 0.1),
    "f16 subnormal": (True, (0, 1), (0, 1), (0, 100), False, 0.4),
    "f16 wide": (True, (0, 2), (0, 30), (0, 110), False, 0.5),
    "f16 large": (True, (28, 30), (28, 30), (240, 254), False, 0.0),
}


def cases(half):
    rng = random.Random(20 if half else 10)
    for is_half, a_range, b_range, c_range, specials, zero in KINDS.values():
        if is_half != half:
            continue
        for _ in range(CASES_PER_KIND):
            a = [float16(rng, half, *a_range) for _ in range(16)]
            b = [float16(rng, half, *b_range) for _ in range(16)]
            if specials:
                a = [with_specials(rng, half, v) for v in a]
                b = [with_specials(rng, half, v) for v in b]
            if rng.random() < 0.3:  # pairs that cancel
                for i in range(0, 16, 2):
                    a[i + 1], b[i + 1] = a[i] ^ 0x8000, b[i]
            acc = 0 if rng.random() < zero else float32(rng, *c_range)
            if specials and rng.random() < 0.2:
                acc = rng.choice((0x7F800000, 0xFF800000, 0x7FC00000))
            yield a, b, acc
    # Sixteen greatest products of one sign and the accumulator: the sum needs 33 bits.
    top = 0x3BFF if half else 0x3F7F
    for sign in (0, 0x8000):
        yield [top | sign] * 16, [top] * 16, 0x3F7FFFFF | sign << 16
    yield [0x8000] * 16, [0x3F00] * 16, 0x80000000  # nothing but zeros: +0


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tensors = []
    for half in (False, True):
        rows = list(cases(half))
        name, dtype = ("f16", "F16") if half else ("bf16", "BF16")
        n = len(rows)
        acc = struct.pack(f"<{n}I", *(r[2] for r in rows))
        out = struct.pack(f"<{n}I", *(step16(*r, half) for r in rows))
        a = b"".join(struct.pack("<16H", *r[0]) for r in rows)
        b = b"".join(struct.pack("<16H", *r[1]) for r in rows)
        tensors += [(f"{name}.acc", "U32", [n], acc), (f"{name}.out", "U32", [n], out),
                    (f"{name}.a", dtype, [n, 16], a), (f"{name}.b", dtype, [n, 16], b)]
    tensors.sort(key=lambda t: t[1] != "U32")
    header, at = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(sys.argv[1], "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(t[3] for t in tensors))


if __name__ == "__main__":
    main()
