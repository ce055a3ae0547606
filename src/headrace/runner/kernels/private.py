"""Owns every use of torch's private names; nothing else may have one."""

import torch


def allow_matrix_unit() -> bool:
    """Asks the system for its use, for the whole process; False if there is no such unit."""
    try:
        return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
    except AttributeError:
        return False
