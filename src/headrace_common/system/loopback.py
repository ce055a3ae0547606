"""Says which host names mean the machine itself."""

import ipaddress


def is_loopback(name: str) -> bool:
    """Return whether this host name or address always means the machine itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
