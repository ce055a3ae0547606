from headrace.runner.kernels.forms import forms_here

OWN_FORMS = [form for form in forms_here() if form != "plain"] or ["avx2"]
"""The forms of our own kernels that this machine can run."""
