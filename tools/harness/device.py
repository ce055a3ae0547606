"""The device on which tests run Headrace's models; their references always run on the CPU."""

import os

# HEADRACE_TEST_DEVICE=cuda runs tests/equality and tests/runner/lanes on a GPU.
DEVICE = os.environ.get("HEADRACE_TEST_DEVICE", "cpu")
