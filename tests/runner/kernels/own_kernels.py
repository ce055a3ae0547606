import pytest

from headrace.runner.kernels.instruction_sets import instruction_sets_here

OWN_SETS = [one for one in instruction_sets_here() if one != "plain"] or ["avx2"]
"""The instruction sets of our own kernels that this machine can run."""

needs_own_kernels = pytest.mark.skipif(
    instruction_sets_here()[0] == "plain", reason="this processor runs no kernels but torch's"
)
