"""A quantized layer and an MLP in torch, plain and compiled."""
import torch

import qmlp
import qmlp.torch

torch.manual_seed(1)
hidden, intermediate = 256, 512
gate, up = torch.randn(intermediate, hidden), torch.randn(intermediate, hidden)
mlp = qmlp.torch.FusedMLP(
    qmlp.pack(qmlp.quantize(gate, bits=4), qmlp.quantize(up, bits=8), activation="bf16"),
    qmlp.pack(qmlp.quantize(torch.randn(hidden, intermediate)), activation="bf16"))
head = qmlp.torch.QuantizedLinear(qmlp.pack(qmlp.quantize(torch.randn(64, hidden)),
                                            activation="bf16"))


def model(x):
    return head(torch.nn.functional.rms_norm(mlp(x, residual=x), (hidden,)))


with torch.no_grad():
    x = torch.randn(2, 5, hidden, dtype=torch.bfloat16)
    plain, compiled = model(x), torch.compile(model, fullgraph=True)(x)
    print("shape:", tuple(plain.shape), plain.dtype)
    print("compiled is close:", bool(torch.allclose(plain, compiled, rtol=0.02, atol=0.5)))
