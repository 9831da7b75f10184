"""What is wrong with an op's arguments, in the one line for which nanobind needs several.

The ops do not look at types themselves: the extension does, and who catches its TypeError asks here.
"""

from __future__ import annotations

from typing import Any

from .._mlx import PackedWeight
from .._words import kind_of
from ._load import mx

_WEIGHT = (PackedWeight, "a qmlp.mlx.PackedWeight: qmlp.mlx.pack")
_NEEDS: dict[str, tuple[Any, str]] = {
    "x": (mx.array, "an mx.array"),
    "weight": _WEIGHT,
    "gate_up": _WEIGHT,
    "down": _WEIGHT,
    "stream": ((mx.Stream, mx.ThreadLocalStream, mx.Device, mx.DeviceType, type(None)),
               "an mx.Stream or mx.Device, or None"),
}
_OPTIONAL = ((mx.array, type(None)), "an mx.array or None")


def explained(op: str, error: TypeError, **arguments: Any) -> TypeError:
    """For `raise … from None`: which argument `error` is about, or `error` where it is about none."""
    for name, value in arguments.items():
        kinds, words = _NEEDS.get(name, _OPTIONAL)
        if not isinstance(value, kinds):
            return TypeError(f"{op}: {name} is {kind_of(value)}, needs {words}")
    return error
