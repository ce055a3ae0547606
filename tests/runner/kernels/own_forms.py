import pytest

from headrace.runner.kernels.forms import forms_here

OWN_FORMS = [form for form in forms_here() if form != "plain"] or ["avx2"]
"""The forms of our own kernels that this machine can run."""

needs_own_forms = pytest.mark.skipif(
    forms_here()[0] == "plain", reason="this processor runs no kernels but torch's"
)
