"""A quantized layer and an MLP in torch, plain and compiled; on a GPU where there is one."""
import torch

import qmlp
import qmlp.torch

torch.manual_seed(1)
answer = qmlp.supports(qmlp.LinearProblem(N=64, K=256), "cuda")
device = "cuda" if answer and torch.cuda.is_available() else "cpu"
print("device:", device, "" if device == "cuda" else f"({answer})")


def packed(*weights):
    return qmlp.pack(*weights, activation="bf16", device=device)


hidden, intermediate = 256, 512
gate, up = torch.randn(intermediate, hidden), torch.randn(intermediate, hidden)
mlp = qmlp.torch.FusedMLP(
    packed(qmlp.quantize(gate, bits=4), qmlp.quantize(up, bits=8)),
    packed(qmlp.quantize(torch.randn(hidden, intermediate))))
head = qmlp.torch.QuantizedLinear(packed(qmlp.quantize(torch.randn(64, hidden))))


def model(x):
    return head(torch.nn.functional.rms_norm(mlp(x, residual=x), (hidden,)))


with torch.no_grad():
    x = torch.randn(2, 5, hidden, dtype=torch.bfloat16, device=device)
    plain, compiled = model(x), torch.compile(model, fullgraph=True)(x)
    print("shape:", tuple(plain.shape), plain.dtype)
    print("compiled is close:", bool(torch.allclose(plain, compiled, rtol=0.02, atol=0.5)))
