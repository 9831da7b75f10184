"""The three activation types, by the codes of qmlp/c_api.h and by the names that people use."""

from __future__ import annotations

from typing import Any

from ._words import shown

F32, F16, BF16 = 0, 1, 2
NAMES = ("f32", "f16", "bf16")
ITEMSIZE = (4, 2, 2)

_ALIASES = {
    "f32": F32, "float32": F32,
    "f16": F16, "float16": F16, "half": F16,
    "bf16": BF16, "bfloat16": BF16,
}


def code_of(dtype: Any, what: str = "dtype") -> int:
    """The code of "f32", "f16", "bf16", or of NumPy's, ml_dtypes', torch's or MLX's own dtype.

    Raises TypeError for any other type; `what` is its name in the message.
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        # numpy.dtype has a name; torch.float32 and mlx.core.float32 end in it.
        own = getattr(dtype, "name", None)
        name = own if isinstance(own, str) else shown(dtype).rpartition(".")[2]
    code = _ALIASES.get(name)
    if code is None:
        raise TypeError(f"{what} is {shown(dtype)}, needs f32, f16 or bf16")
    return code
