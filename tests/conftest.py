"""Two test workers on two cores: one torch thread each, or their barriers wait for one another."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
