"""mlx-lm's own commands on patched models.

    python -m qmlp.mlx generate MODEL --prompt 'What is the capital of France?'
    python -m qmlp.mlx bench MODEL -p 512 -g 64
    python -m qmlp.mlx server MODEL --port 8080
    python -m qmlp.mlx chat MODEL

What follows MODEL are the options of mlx_lm.generate, mlx_lm.benchmark, mlx_lm.server and mlx_lm.chat.
--unpatched runs the same command on MLX alone, --quiet leaves the report out.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

COMMANDS = {"generate": "mlx_lm.generate", "bench": "mlx_lm.benchmark", "server": "mlx_lm.server",
            "chat": "mlx_lm.chat"}


def _fail(message: str) -> int:
    print(f"qmlp.mlx: {message}", file=sys.stderr)
    return 2


def _load_patched(load: Any, quiet: bool) -> Any:
    from . import patch

    def load_and_patch(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        report = patch(loaded[0])
        if not quiet:
            print(report, file=sys.stderr)
        return loaded

    return load_and_patch


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return _fail(f"no command is called {name!r}, needs one of {', '.join(COMMANDS)}")
    unpatched = "--unpatched" in rest
    quiet = "--quiet" in rest
    rest = [word for word in rest if word not in ("--unpatched", "--quiet")]
    if rest and not rest[0].startswith("-"):
        rest = ["--model", *rest]
    try:
        if not unpatched:
            from . import _load  # noqa: F401  (says what does not fit before mlx-lm starts)
        command = importlib.import_module(COMMANDS[name])
    except ImportError as error:
        return _fail(str(error))
    if not unpatched:
        from mlx_lm import utils

        original = utils.load
        replacement = _load_patched(original, quiet)
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "mlx_lm"]:
            if getattr(module, "load", None) is original:
                setattr(module, "load", replacement)
    sys.argv = [f"python -m qmlp.mlx {name}", *rest]
    command.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
