"""Quantizes an MLP's weights and runs it on NumPy arrays, fused and by parts: the same bits."""
import numpy

import qmlp

random = numpy.random.default_rng(1)
hidden, intermediate = 256, 512
gate, up = (random.standard_normal((intermediate, hidden), dtype=numpy.float32) for _ in range(2))
down = random.standard_normal((hidden, intermediate), dtype=numpy.float32)

# Each matrix with its own width; packed once, used many times.
gate_up = qmlp.pack(qmlp.quantize(gate, bits=4), qmlp.quantize(up, bits=8, group_size=32))
packed_down = qmlp.pack(qmlp.quantize(down, bits=6))

x = random.standard_normal((3, hidden), dtype=numpy.float32)
y = qmlp.fused_mlp(x, gate_up, packed_down, residual=x)
by_parts = qmlp.quantized_linear(qmlp.fused_swiglu(x, gate_up), packed_down, residual=x)
one_row = qmlp.fused_mlp(x[1], gate_up, packed_down, residual=x[1])

print(f"{gate_up.plan.kernel_name(3)}: y[0][0] = {y[0, 0]:.7g}")
print("fused equals separate:", bool((y == by_parts).all()))
print("one row equals many:", bool((y[1] == one_row).all()))
