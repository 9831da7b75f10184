"""Says what to run instead: the program of the package is a command of its own."""

import sys

print("qmlp: the program is the command `qmlp` (see `qmlp --help`); for mlx-lm's commands on qmlp's ops "
      "run `python -m qmlp.mlx`", file=sys.stderr)
sys.exit(2)
