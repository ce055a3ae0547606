"""One compute thread for every test: results do not move, and tests may run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
