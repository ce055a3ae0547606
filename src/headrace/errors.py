"""The exceptions that Python callers catch, in process and over HTTP alike; knows neither."""


class HeadraceError(Exception):
    """Root of all. `code` is stable, so programs can act on it."""

    code = "internal_error"


class ConfigError(HeadraceError):
    """A flag, variable, key of the configuration, address or API key is wrong."""

    code = "config_invalid"


class RequestFailed(HeadraceError):
    """A request was refused or its answer was cut short; `param` names a field that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class StreamFailed(RequestFailed):
    """The stream ended before its answer was whole: it failed, or somebody stopped it."""
