"""What can go wrong for a client beside a stream that failed, and another try does not mend it."""

from headrace.errors import HeadraceError, RequestFailed


class Unreachable(HeadraceError):
    """No server answered, at first or for longer than the client's patience."""

    code = "unreachable"


class Refused(RequestFailed):
    """The server does not do what was asked; `status` is that of its answer."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.status = status
