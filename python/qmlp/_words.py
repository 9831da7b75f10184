"""How messages name what was found, in one line whatever it is."""

from __future__ import annotations

from typing import Any

_LONGEST = 80


def kind_of(value: Any) -> str:
    """A value's type as its users spell it, with an article."""
    if value is None:
        return "None"
    of = type(value)
    module = of.__module__.replace("qmlp._mlx", "qmlp.mlx")
    parts = [part for part in module.split(".") if not part.startswith("_")]
    if module == "builtins":
        parts = []
    name = ".".join((*parts, of.__qualname__))
    return f"{'an' if name[0] in 'aeiouAEIOU' or name.startswith('mlx') else 'a'} {name}"


def shown(value: Any) -> str:
    """A value itself where it is short, otherwise its type."""
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        return kind_of(value)  # and its elements may not exist yet
    try:
        text = repr(value)
    except Exception:  # of a class of the caller's, or a number of too many digits
        return kind_of(value)
    if len(text) > _LONGEST and isinstance(value, str):
        return text[:_LONGEST] + "..."
    if len(text) > _LONGEST or not text.isprintable() or " at 0x" in text:
        return kind_of(value)
    return text


def one_line(error: BaseException) -> str:
    """The first line of what an exception of another library says; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
