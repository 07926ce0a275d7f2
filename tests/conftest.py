"""Settings that every test shares, made before torch is loaded."""

import atexit
import os
import shutil
import tempfile

# The workers of the test run share the cores: more threads than one each only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some processors lack instructions that bfloat16 kernels would use; asked before torch is loaded, they do without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# What is measured here is of no use to the user, and what the user measured of none here.
if "PENSTOCK_CACHE" not in os.environ:
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-test-profiles-")
    atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"], ignore_errors=True)

from hypothesis import settings

# The machine is shared and slow at times: a slow example is no failure, and every run tries the same examples.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")
