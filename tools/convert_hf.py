"""Thin command: convert between HF and Megatron checkpoints.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.convert.convert_hf import main

if __name__ == "__main__":
    sys.exit(main())
