"""Errors that another attempt cannot fix. A failed stream has a separate error."""

from headrace_common.errors import HeadraceError, RequestFailed


class Unreachable(HeadraceError):
    """No server answered, either at the first attempt or for longer than the client's patience."""

    code = "unreachable"


class Refused(RequestFailed):
    """The server refused the request with the HTTP status `status`."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.status = status
