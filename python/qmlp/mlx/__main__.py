"""mlx-lm's own commands on patched models.

    python -m qmlp.mlx generate MODEL --prompt 'What is the capital of France?'
    python -m qmlp.mlx bench MODEL -p 512 -g 64
    python -m qmlp.mlx server MODEL --port 8080
    python -m qmlp.mlx chat MODEL

What follows MODEL are the options of mlx_lm.generate, mlx_lm.benchmark, mlx_lm.server and mlx_lm.chat.
--unpatched runs the same command on MLX alone, --quiet leaves the report out. A value that looks like an
option is written with its option: --prompt=--quiet.

Exit status: 0 done, 2 bad usage or input, 3 another error, 130 interrupted. Errors are one line;
`python -X dev -m qmlp.mlx` shows where they come from.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
import threading
from typing import Any

from .._words import one_line, shown

COMMANDS = {"generate": "mlx_lm.generate", "bench": "mlx_lm.benchmark", "server": "mlx_lm.server",
            "chat": "mlx_lm.chat"}
_OWN = {"--unpatched": "run on MLX alone", "--quiet": "no report of what was patched"}
_BAD_INPUT, _OTHER_ERROR, _INTERRUPTED = 2, 3, 130
_QMLP_CACHE = b"QMLPKV\r\n"  # how the program's own prompt caches begin
_INPUT_ERRORS = (ValueError, KeyError, FileNotFoundError, IsADirectoryError, NotADirectoryError,
                 PermissionError)


class _Refused(Exception):
    """Bad usage or input; says what is to be printed."""


def _drop(*streams: Any) -> None:
    """Nobody reads them: what is still buffered must not fail again at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        try:
            os.dup2(nowhere, stream.fileno())
        except (AttributeError, OSError, ValueError):
            pass  # it is closed, or no file


def _tell(text: str) -> None:
    """Standard error, if there is one, gets it as a line that no other thread's text is put into; what
    is done and how it ends does not depend on a reader there."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _fail(message: str, status: int = _BAD_INPUT) -> int:
    _tell(f"qmlp.mlx: {message}")
    return status


def _check_model(name: str, model: str) -> None:
    """Refuses what is neither a folder nor, by its form, a repository of the Hugging Face Hub."""
    if os.path.isdir(model):
        return
    if os.path.exists(model):
        raise _Refused(f"{name} is {shown(model)}, a file, needs a folder (`qmlp convert` makes one of "
                       "a GGUF file)")
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", model):
        raise _Refused(f"{name} is {shown(model)}, needs a folder that exists or the name of a "
                       "repository on the Hugging Face Hub")


def _check_prompt_cache(path: str) -> None:
    try:
        with open(path, "rb") as file:
            head = file.read(len(_QMLP_CACHE))
    except OSError as error:
        raise _Refused(f"--prompt-cache-file is {shown(path)}: {error.strerror}") from None
    if head == _QMLP_CACHE:
        raise _Refused(f"--prompt-cache-file is {shown(path)}, saved by `qmlp generate`, needs a cache "
                       "of mlx_lm.cache_prompt")


class _Command:
    """One of mlx-lm's commands, with MODEL and our options as arguments of its own."""

    def __init__(self, name: str, words: list[str]) -> None:
        self.name = name
        own = 0
        while own < len(words) and words[own] in _OWN:
            own += 1
        self.model: str | None = None
        if own < len(words) and not words[own].startswith("-"):
            self.model = words[own]
            words = words[:own] + words[own + 1:]
        self.words = words
        self.unpatched = self.quiet = False
        self.needed: set[str] = set()  # models without which the command cannot go on

    def run(self) -> int:
        module = importlib.import_module(COMMANDS[self.name])
        self._replace_load()
        self._replace_load_prompt_cache(module)
        self._replace_parser()
        try:
            module.main()
        except EOFError:
            if self.name != "chat":
                raise
        return _INTERRUPTED if self.name == "server" else 0  # a server ends in no other way

    def _replace_parser(self) -> None:
        """The next parser that parses, mlx-lm's, learns our arguments and says errors in one line."""
        original = argparse.ArgumentParser.parse_args

        def parse(parser: Any, args: Any = None, namespace: Any = None) -> Any:
            setattr(argparse.ArgumentParser, "parse_args", original)
            parser.prog = f"python -m qmlp.mlx {self.name}"
            parser.usage = "%(prog)s MODEL [options]"
            parser.error = self._usage_error
            parser.set_defaults(model=None)
            for option, what in _OWN.items():
                parser.add_argument(option, action="store_true", help=what)
            parsed = original(parser, self.words, namespace)
            self._take(parsed)
            return parsed

        setattr(argparse.ArgumentParser, "parse_args", parse)

    def _usage_error(self, message: str) -> None:
        raise _Refused(f"{self.name}: {message}; see python -m qmlp.mlx {self.name} --help")

    def _take(self, parsed: Any) -> None:
        self.unpatched, self.quiet = parsed.unpatched, parsed.quiet
        prompt_cache = getattr(parsed, "prompt_cache_file", None)
        if prompt_cache is not None:
            _check_prompt_cache(prompt_cache)
        if self.model is not None and parsed.model is not None:
            self._usage_error("MODEL is given twice")
        if self.model is not None:
            parsed.model = self.model
        if parsed.model is not None:
            _check_model("MODEL", parsed.model)
        elif prompt_cache is None:  # which names its model
            self._usage_error("MODEL is missing, needs a folder or the name of a repository on the "
                              "Hugging Face Hub")
        draft = getattr(parsed, "draft_model", None)
        if draft is not None:
            _check_model("--draft-model", draft)
        self.needed = {path for path in (parsed.model, draft) if path is not None}

    def _replace_load(self) -> None:
        from mlx_lm import utils

        original = utils.load

        def load(path: str, *args: Any, **kwargs: Any) -> Any:
            try:
                loaded = original(path, *args, **kwargs)
                report = None if self.unpatched else self._patched(loaded[0])
            except Exception as error:
                if sys.flags.dev_mode:
                    raise
                where = "" if os.path.isdir(path) else ", which is no folder here"
                message = f"cannot load {shown(path)}{where}: {_said(error)}"
                if threading.current_thread() is threading.main_thread():
                    raise _Refused(message) from None
                if path not in self.needed:
                    raise  # the server's answer to a request
                # The main thread waits for requests, and may have been started to ignore Ctrl-C.
                os._exit(_fail(message))
            self.needed.discard(path)
            if report is not None and not self.quiet:
                _tell(str(report))
            return loaded

        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "mlx_lm"]:
            if getattr(module, "load", None) is original:
                setattr(module, "load", load)

    def _replace_load_prompt_cache(self, module: Any) -> None:
        original: Any = getattr(module, "load_prompt_cache", None)

        def load(path: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(path, *args, **kwargs)
            except Exception as error:
                if sys.flags.dev_mode:
                    raise
                raise _Refused(f"--prompt-cache-file is {shown(path)}, needs a cache of "
                               f"mlx_lm.cache_prompt: {_said(error)}") from None

        if original is not None:
            setattr(module, "load_prompt_cache", load)

    def _patched(self, model: Any) -> Any:
        from . import patch

        return patch(model)


def _said(error: BaseException) -> str:
    """An exception of mlx-lm's in one line; only some of them say what they are."""
    said = one_line(error)
    if isinstance(error, (OSError, ValueError, RuntimeError)) or said == type(error).__name__:
        return said
    return f"{type(error).__name__}: {said}"


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise _Refused(f"no command is called {shown(name)}, needs one of {', '.join(COMMANDS)}")
    try:
        return _Command(name, rest).run()
    except SystemExit as end:  # of argparse, after --help
        return end.code if isinstance(end.code, int) else 0
    except (_Refused, BrokenPipeError, ImportError):
        raise
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        status = _fail(f"{name}: {_said(error)}",
                       _BAD_INPUT if isinstance(error, _INPUT_ERRORS) else _OTHER_ERROR)
        _drop(sys.stdout, sys.stderr)
        return status


def main(arguments: list[str]) -> int:
    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        elif status == 0:  # it was closed from the start, and print says nothing of that
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # as of `qmlp … | head`
        _drop(sys.stdout, sys.stderr)
        return 0
    except (_Refused, ImportError) as error:
        if sys.flags.dev_mode and isinstance(error, ImportError):
            raise
        return _fail(one_line(error))
    except OSError as error:  # _run has said all others
        if sys.flags.dev_mode:
            raise
        status = _fail(f"standard output: {error.strerror}", _OTHER_ERROR)
        _drop(sys.stdout, sys.stderr)
        return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if sys.argv[1:2] == ["server"]:
        # MLX takes the GIL where a thread of its user ends, and the server's may just do so: if the
        # interpreter finalizes then, the process is aborted.
        os._exit(status)
    sys.exit(status)
