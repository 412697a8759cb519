"""Every exception of ours. Callers match types and attributes, never text."""


class HeadraceError(Exception):
    """Base of all of them."""


class WireError(HeadraceError):
    """Bytes are not a frame, or a frame cannot become bytes."""


class FrameTooLong(WireError):
    """A body has more bytes than the limit."""

    def __init__(self, got: int, limit: int) -> None:
        super().__init__(got, limit)
        self.got = got
        self.limit = limit

    def __str__(self) -> str:
        return f"frame of {self.got} bytes, the limit is {self.limit}"


class FrameTruncated(WireError):
    """The bytes end too early, or a length says more than the bytes after it."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at

    def __str__(self) -> str:
        return f"frame ends inside {self.at}"


class UnknownFrameType(WireError):
    """No frame has this type."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"unknown frame type {self.number}"


class OtherProtocol(WireError):
    """A Hello of another version of the protocol. Its other fields were not read."""

    def __init__(self, got: int, ours: int) -> None:
        super().__init__(got, ours)
        self.got = got
        self.ours = ours

    def __str__(self) -> str:
        return f"a peer of protocol version {self.got}, this side speaks {self.ours}"


class MalformedFrame(WireError):
    """A field is missing, too many, of another type, or out of range."""

    def __init__(self, at: str, expected: str, got: str) -> None:
        super().__init__(at, expected, got)
        self.at = at  # frame and field, such as `hello.fingerprints.tokenizer`
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"{self.at}: expected {self.expected}, got {self.got}"


class TrailingBytes(WireError):
    """The frame is complete and bytes follow."""

    def __init__(self, frame: str, extra: int) -> None:
        super().__init__(frame, extra)
        self.frame = frame
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.extra} bytes after the end of a {self.frame} frame"


class LinkError(HeadraceError):
    """A worker and a router cannot work together."""


class LinkLost(LinkError):
    """The link is gone. Dialling again may help."""


class LinkClosed(LinkLost):
    """The router hung up after a whole frame, as it does when it ends in good order, or when it drops a worker."""


class Refused(LinkError):
    """The router does not want this worker, and will not the next time either."""

    def __init__(self, field: str, expected: str, got: str, message: str) -> None:
        super().__init__(field, expected, got, message)
        self.field = field  # what differs, such as `protocol` or `fingerprints.tokenizer`
        self.expected = expected  # the fleet's value
        self.got = got  # the worker's value
        self.message = message

    def __str__(self) -> str:
        return (
            f"the router refused this worker: {self.field} is {self.got!r}, "
            f"the fleet has {self.expected!r}: {self.message}"
        )


class HeldOff(LinkError):
    """The router does not take this worker now: it came and went too often, or its name is taken. Later it may."""

    def __init__(self, retry_after_s: float, message: str) -> None:
        super().__init__(retry_after_s, message)
        self.retry_after_s = retry_after_s
        self.message = message

    def __str__(self) -> str:
        return f"the router holds this worker off for {self.retry_after_s:.1f} s: {self.message}"


class AlreadyJoined(LinkError):
    """This address leads to a router that has a link to this worker."""

    def __init__(self, router: str) -> None:
        super().__init__(router)
        self.router = router

    def __str__(self) -> str:
        return f"a second way to {self.router}; one link is enough"


class RouterNotTrusted(LinkError):
    """The router did not prove that it knows the deployment secret, or wants one that we lack."""


class ConfigError(HeadraceError, ValueError):
    """A router was configured wrongly. The text names the setting and says what would be right."""


class EtcdFailed(HeadraceError, OSError):
    """No member of an etcd did what it was asked for."""


class EtcdCompacted(EtcdFailed):
    """The history that a watch should begin with is gone: read again."""


class StartError(HeadraceError, OSError):
    """A router could not start, for instance because its port is taken."""


class CannotRun(HeadraceError, ValueError):
    """What was typed is right and cannot be done with this machine or this model. One line; commands end with 78."""


class MissingExtra(CannotRun):
    """A package is not installed that the base install does not bring. The text names the extra that does."""

    def __init__(self, package: str, extra: str, what_for: str = "") -> None:
        super().__init__(package, extra, what_for)
        self.package = package
        self.extra = extra
        self.what_for = what_for

    def __str__(self) -> str:
        start = f"{self.what_for}: " if self.what_for else ""
        return f"{start}{self.package} is not installed; run: pip install 'headrace[{self.extra}]'"


class NoDevice(CannotRun):
    """The device that a flag names cannot be used on this machine. The text says what is missing and what to do."""


class ContextTooLong(CannotRun):
    """Somebody typed a longer context than the model allows or the KV cache holds."""

    def __init__(self, typed: int, limit: int, of: str, instead: str) -> None:
        super().__init__(typed, limit, of, instead)
        self.typed = typed
        self.limit = limit
        self.of = of  # whose limit, as a clause
        self.instead = instead

    def __str__(self) -> str:
        return (
            f"--max-model-len (--context-tokens) {self.typed} is more than the {self.limit} tokens that {self.of}; "
            f"give at most {self.limit}, or {self.instead}"
        )
