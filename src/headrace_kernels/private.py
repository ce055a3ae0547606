"""Contains all uses of torch's private names. No other module may use a private name."""

import torch


def allow_amx() -> bool:
    """Ask the system to let this process use AMX; return whether the system allows it."""
    try:
        return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
    except AttributeError:
        return False
