"""The exceptions of the package, and the library's status codes as exceptions."""


class Error(Exception):
    """What the library refused. `code` is its name: "invalid_argument", "unsupported", ..."""

    code = "internal"


class InvalidArgumentError(Error, ValueError):
    """The caller broke a documented requirement."""

    code = "invalid_argument"


class UnsupportedError(Error, ValueError):
    """Well formed, but nothing here takes it."""

    code = "unsupported"


class CorruptFileError(Error, ValueError):
    """The bytes of a file contradict its format."""

    code = "corrupt_file"


class FileError(Error, OSError):
    """The operating system refused a file operation."""

    code = "io"


class OutOfMemoryError(Error, MemoryError):
    """An allocation failed."""

    code = "out_of_memory"


class DeviceError(Error, RuntimeError):
    """The driver, runtime or system reported a failure."""

    code = "device"


class InterruptedCallError(Error, RuntimeError):
    """A stop request was honoured."""

    code = "interrupted"


class InternalError(Error, RuntimeError):
    """A bug in this library."""

    code = "internal"


# By qmlp_status of qmlp/c_api.h.
_BY_STATUS = (
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
    CorruptFileError,
    FileError,
    OutOfMemoryError,
    DeviceError,
    InterruptedCallError,
    InternalError,
)


def _raise(status: int, message: str) -> None:
    kind = _BY_STATUS[status] if 0 < status < len(_BY_STATUS) else InternalError
    raise kind(message)
