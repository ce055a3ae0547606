"""Owns every use of torch's private names; nothing else may have one."""

import torch


def allow_amx() -> bool:
    """Asks the system to let this process use AMX; False if there is none."""
    try:
        return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
    except AttributeError:
        return False
