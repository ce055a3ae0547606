"""Errors that a client cannot mend by trying again, apart from a stream that failed."""

from headrace_common.errors import HeadraceError, RequestFailed


class Unreachable(HeadraceError):
    """No server answered, at first or for longer than the client's patience."""

    code = "unreachable"


class Refused(RequestFailed):
    """The server refused the request; `status` is that of its answer."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.status = status
