"""What can go wrong for a client, as far as another try does not mend it."""


class ClientError(Exception):
    """Root. `code` is the server's own, stable."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Unreachable(ClientError):
    """No server answered, at first or for longer than the client's patience."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unreachable")


class Refused(ClientError):
    """The server does not do what was asked; `param` names the field that is wrong."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message, code)
        self.status = status
        self.param = param


class StreamFailed(ClientError):
    """The stream ended before its answer was whole: it failed, or somebody stopped it."""
