"""Some processors lack instructions that bfloat16 kernels would use; asked before torch is loaded, they do without."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
