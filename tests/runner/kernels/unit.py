import pytest

from headrace.runner.kernels.matrix import has_matrix_unit

needs_unit = pytest.mark.skipif(not has_matrix_unit(), reason="no matrix unit")
