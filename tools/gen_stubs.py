#!/usr/bin/env python3
"""gen_stubs.py [--check] PACKAGE_DIR: writes python/qmlp/_native.pyi and _mlx.pyi from the extension
modules of a build (PACKAGE_DIR is BUILD/python). Needs nanobind, numpy and mlx."""
import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def stub(name):
    from nanobind.stubgen import StubGen

    module = importlib.import_module(f"qmlp.{name}")
    generator = StubGen(module)
    generator.put(module)
    return generator.get().replace("PyCapsule", "object")


def main():
    arguments = [word for word in sys.argv[1:] if word != "--check"]
    check = "--check" in sys.argv
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.path.insert(0, arguments[0])
    import mlx.core  # noqa: F401  (libmlx, before _mlx)

    stale = []
    for name in ("_native", "_mlx"):
        path = ROOT / "python" / "qmlp" / f"{name}.pyi"
        text = stub(name)
        if check and (not path.is_file() or path.read_text() != text):
            stale.append(f"{path.relative_to(ROOT)} is not what the module says: tools/gen_stubs.py")
        elif not check:
            path.write_text(text)
    print("\n".join(stale), file=sys.stderr, end="\n" if stale else "")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
