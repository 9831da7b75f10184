"""Loads MLX and the extension that was built for it; one sentence when they do not fit."""

from __future__ import annotations

import importlib.util

_INSTALL = "pip install 'qmlp[mlx]' installs versions that fit"


def _load():
    if importlib.util.find_spec("qmlp._mlx") is None:
        raise ImportError("this build of qmlp has no qmlp.mlx: build it with QMLP_MLX=ON, or use a "
                          "wheel that has it")
    from .. import _mlx_build as built

    try:
        import mlx.core as mx
    except ImportError as error:
        raise ImportError(f"qmlp.mlx needs mlx {built.MLX} ({error}); {_INSTALL}") from None
    # MLX promises no stable C++ interface between versions.
    if mx.__version__ != built.MLX:
        raise ImportError(f"qmlp.mlx was built for mlx {built.MLX}, this is mlx {mx.__version__}; "
                          f"{_INSTALL}")
    try:
        from .. import _mlx as native
    except ImportError as error:
        raise ImportError(f"qmlp.mlx cannot load its extension for mlx {built.MLX}: {error}; "
                          f"{_INSTALL}") from None
    try:
        native.probe(mx.zeros((1,)))
    except TypeError:
        raise ImportError(f"qmlp.mlx was built with nanobind {built.NANOBIND}, whose interface differs "
                          f"from that of this mlx {mx.__version__}; {_INSTALL}") from None
    if native.gpu_mismatch():
        raise ImportError(f"qmlp.mlx cannot use this mlx {mx.__version__}: {native.gpu_mismatch()}; "
                          f"{_INSTALL}")
    return mx, native


mx, native = _load()
