"""Thin command: check what a first GPU must show.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.gpu_check.gpu_check import main

if __name__ == "__main__":
    sys.exit(main())
