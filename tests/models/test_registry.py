import subprocess
import sys

import pytest

from headrace_engine.models.registry import FAMILIES, family


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_entry_names_a_model(architecture: str) -> None:
    make = family(architecture)
    assert make.weights and callable(make.read)


def test_looking_a_model_up_loads_no_tensor_library() -> None:
    code = "import sys, headrace_engine.models.registry;"
    code += "import headrace_common.checkpoints.spec, headrace_common.checkpoints.headers;"
    code += "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
