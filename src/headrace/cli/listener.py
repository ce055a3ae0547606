"""The socket that a server listens on, and why there is none."""

import errno
import os
import socket

from headrace_common.config.settings import HttpConfig
from headrace_common.errors import ConfigError


def listen(http: HttpConfig) -> socket.socket:
    """Listen on an address; raise OSError if it is in use, not this machine's, or not allowed.

    `::` accepts clients over both IPv6 and IPv4 where the system allows that.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    is_dual = http.host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (http.host, http.port), family=family, backlog=2048, dualstack_ipv6=is_dual
    )


def no_listener(http: HttpConfig, error: OSError) -> ConfigError:
    """Why an address cannot be listened on, and which flag mends it."""
    is_known = error.errno in errno.errorcode  # the numbers of name lookups are others
    why = os.strerror(error.errno or 0) if is_known else error.strerror
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"--port: {http.port} may not be listened on ({why}); give one above 1023."
        )
    return ConfigError(
        f"--host: {http.host} cannot be listened on ({why}); give an address of this machine, such "
        "as 127.0.0.1, or 0.0.0.0 for all of them."
    )


def address_of(listener: socket.socket) -> str:
    """Host and port as a URL has them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
