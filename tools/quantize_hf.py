"""Thin command: quantise or dequantise an HF checkpoint.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.quantize.quantize_hf import main

if __name__ == "__main__":
    sys.exit(main())
