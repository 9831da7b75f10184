"""Calls on torch's CUDA tensors in the fewest steps: what is plain is done here, and anything else (an
other layout, type or device, a gradient, a mistake) is None, for the general path to do or to refuse.

Nothing of torch is imported for those who do not: `start` fills the names in when `_arrays` meets it.
"""

from __future__ import annotations

from typing import Any, Callable

from . import _arrays
from ._native import cuda_linear, cuda_mlp, cuda_swiglu, mlp_workspace_bytes
from ._weights import PackedWeight

# torch.Tensor once torch is met; no type is None.
Tensor: Any = None
compiling: Callable[[], bool] = lambda: False
_dtypes: tuple[Any, ...] = ()
_raw_stream: Any = None
_num_modes: Any = None
_tracing: Any = None
_transform: Any = None
_forward_ad: Any = None
_bump_versions: Any = None


def start(backend: Any) -> None:
    """Takes what it needs from the torch backend."""
    global Tensor, compiling, _dtypes, _raw_stream, _num_modes, _tracing, _transform, _forward_ad
    global _bump_versions
    torch = backend.torch
    _tracing, _transform, _forward_ad = backend.tracing, backend.transform, backend.forward_ad
    _bump_versions = backend.bump_versions
    _dtypes, _raw_stream, _num_modes = backend.dtypes, backend.raw_stream, backend.num_modes
    compiling = torch.compiler.is_compiling
    Tensor = torch.Tensor


_arrays.when_torch_starts(start)


def _seen() -> bool:
    """Whether something of torch may have to see the call, or differentiates it in forward mode."""
    return (_transform() is not None or _tracing() or _forward_ad._current_level >= 0
            or _num_modes() != 0)


def _plain(x: Any, weight: PackedWeight) -> bool:
    return (x.get_device() == weight._ordinal and x.dtype is _dtypes[weight._code]
            and x.is_contiguous() and not x.requires_grad and not x.is_neg())


def _address(array: Any, weight: PackedWeight, shape: Any) -> int:
    """-1 for an array that is not plain."""
    if type(array) is Tensor and array.shape == shape and _plain(array, weight):
        return array.data_ptr() or -1  # no memory: empty or freed
    return -1


def _target(array: Any, weight: PackedWeight, shape: Any) -> int:
    """The address of an array that the call writes, which torch is told."""
    at = _address(array, weight, shape)
    if at > 0:
        _bump_versions((array,))
    return at


def _shapes(x: Any, K: int, N: int) -> tuple[int, tuple[int, ...] | None]:
    """M and the shape of the result, None for an x of another K."""
    given = x.shape
    if len(given) == 2:
        M, columns = given
        return M, (M, N) if columns == K else None
    if not given or given[-1] != K:
        return 0, None
    return x.numel() // K, (*given[:-1], N)


def linear(x: Any, weight: Any, linear_bias: Any, residual: Any, out: Any) -> Any:
    if type(weight) is not PackedWeight or not _plain(x, weight) or _seen():
        return None
    N, K = weight.N, weight.K
    M, shape = _shapes(x, K, N)
    if shape is None or weight.is_swiglu:
        return None
    bias_at = 0 if linear_bias is None else _address(linear_bias, weight, (N,))
    residual_at = 0 if residual is None else _address(residual, weight, shape)
    if out is None:
        out = x.new_empty(shape)
        out_at = out.data_ptr()
    else:
        out_at = _target(out, weight, shape)
    if bias_at < 0 or residual_at < 0 or out_at < 0:
        return None
    ordinal = weight._ordinal
    workspace = weight._plan.workspace_bytes(M)
    scratch = x.new_empty(workspace + 1 >> 1) if workspace else None
    cuda_linear(
        weight._plan, weight._handle, ordinal, _raw_stream(ordinal), weight._code, M, N, K,
        x.data_ptr(), K, out_at, N, bias_at, residual_at, N,
        scratch.data_ptr() if workspace else 0, workspace)
    return out


def swiglu(x: Any, weight: Any, gate_bias: Any, up_bias: Any, gate_tap: Any, out: Any) -> Any:
    if type(weight) is not PackedWeight or not _plain(x, weight) or _seen():
        return None
    N, K = weight.N, weight.K
    M, shape = _shapes(x, K, N)
    if shape is None or not weight.is_swiglu:
        return None
    gate_at = 0 if gate_bias is None else _address(gate_bias, weight, (N,))
    up_at = 0 if up_bias is None else _address(up_bias, weight, (N,))
    tap_at = 0 if gate_tap is None else _target(gate_tap, weight, shape)
    if out is None:
        out = x.new_empty(shape)
        out_at = out.data_ptr()
    else:
        out_at = _target(out, weight, shape)
    if gate_at < 0 or up_at < 0 or tap_at < 0 or out_at < 0:
        return None
    ordinal = weight._ordinal
    workspace = weight._plan.workspace_bytes(M)
    scratch = x.new_empty(workspace + 1 >> 1) if workspace else None
    cuda_swiglu(
        weight._plan, weight._handle, ordinal, _raw_stream(ordinal), weight._code, M, N, K,
        x.data_ptr(), K, out_at, N, gate_at, up_at, tap_at, N,
        scratch.data_ptr() if workspace else 0, workspace)
    return out


def mlp(x: Any, gate_up: Any, down: Any, gate_bias: Any, up_bias: Any, down_bias: Any,
        residual: Any, out: Any) -> Any:
    if (type(gate_up) is not PackedWeight or type(down) is not PackedWeight
            or not _plain(x, gate_up) or _seen()):
        return None
    N, K, wide = down.N, gate_up.K, gate_up.N
    M, shape = _shapes(x, K, N)
    if (shape is None or not gate_up.is_swiglu or down.is_swiglu or down.K != wide
            or down._ordinal != gate_up._ordinal or down._code != gate_up._code):
        return None
    gate_at = 0 if gate_bias is None else _address(gate_bias, gate_up, (wide,))
    up_at = 0 if up_bias is None else _address(up_bias, gate_up, (wide,))
    down_at = 0 if down_bias is None else _address(down_bias, down, (N,))
    residual_at = 0 if residual is None else _address(residual, down, shape)
    if out is None:
        out = x.new_empty(shape)
        out_at = out.data_ptr()
    else:
        out_at = _target(out, down, shape)
    if gate_at < 0 or up_at < 0 or down_at < 0 or residual_at < 0 or out_at < 0:
        return None
    ordinal = gate_up._ordinal
    workspace = mlp_workspace_bytes(gate_up._plan, down._plan, M)
    scratch = x.new_empty(workspace + 1 >> 1) if workspace else None
    cuda_mlp(
        gate_up._plan, gate_up._handle, down._plan, down._handle, ordinal, _raw_stream(ordinal),
        gate_up._code, M, N, K, x.data_ptr(), K, out_at, N, gate_at, up_at, down_at, residual_at, N,
        scratch.data_ptr() if workspace else 0, workspace)
    return out
