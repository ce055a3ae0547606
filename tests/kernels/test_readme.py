"""Runs the example of the package's README."""

from pathlib import Path

import pytest

import headrace_kernels
from tests.kernels.own_kernels import needs_own_kernels


@needs_own_kernels
def test_the_readmes_example_runs_and_prints_its_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = Path(headrace_kernels.__file__).with_name("README.md").read_text()
    exec(readme.partition("```python\n")[2].partition("```")[0], {})
    assert "torch.Size([3, 512])" in capsys.readouterr().out
