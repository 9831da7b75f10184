"""The hash in tests/model/rope_test.cc, by arithmetic of 60 digits: pip install mpmath numpy."""
import mpmath
import numpy
from mpmath import mpf

mpmath.mp.dps = 60
THETA, DIMS, ORIGINAL = mpf(500000), 64, mpf(8192)
PAIRS = range(DIMS // 2)


def plain(i):
    return THETA ** (-mpf(2 * i) / DIMS)


def llama3(i, factor=8, low=1, high=4):
    wave = 2 * mpmath.pi / plain(i)
    if wave > ORIGINAL / low:
        return plain(i) / factor
    if wave > ORIGINAL / high:
        smooth = (ORIGINAL / wave - low) / (high - low)
        return plain(i) * ((1 - smooth) / factor + smooth)
    return plain(i)


def yarn(i, factor=4, fast=32, slow=1):
    def pair(rotations):
        return (DIMS * mpmath.log(ORIGINAL / (rotations * 2 * mpmath.pi))
                / (2 * mpmath.log(THETA)))
    low, high = max(mpmath.floor(pair(fast)), 0), min(mpmath.ceil(pair(slow)), DIMS - 1)
    ramp = min(max((i - low) / (high - low), mpf(0)), mpf(1))
    return plain(i) * (1 - ramp) + plain(i) / factor * ramp


def to_f32(value):
    near = numpy.float32(float(value))
    around = (numpy.nextafter(near, numpy.float32(-9)), near,
              numpy.nextafter(near, numpy.float32(9)))
    return min(around, key=lambda f: abs(mpf(float(f)) - value))


KINDS = [  # frequency of a pair, divisor of positions, scale
    (plain, 1, mpf(1)),
    (plain, mpf("2.5"), mpf(1)),
    (llama3, 1, mpf(1)),
    (yarn, 1, mpmath.log(4) / 10 + 1),
    (lambda i: plain(i) / mpf("1.75"), 1, mpmath.sqrt(1 + mpmath.log(16) / mpmath.log(8192))),
]

state = 1469598103934665603
for frequency, divisor, scale in KINDS:
    for position in (0, 1, 17, 4095, 131071):
        for function in (mpmath.cos, mpmath.sin):
            for i in PAIRS:
                value = function(mpf(position) / divisor * frequency(i)) * scale
                bits = int(numpy.array(to_f32(value)).view(numpy.uint32))
                state = (state ^ bits) * 1099511628211 % 2 ** 64
print(state)
