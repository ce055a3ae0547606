import pytest

from headrace.runner.kernels.amx import has_amx

needs_amx = pytest.mark.skipif(not has_amx(), reason="no AMX")
