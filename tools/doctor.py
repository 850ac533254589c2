"""Thin command: check the environment.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.doctor.doctor import main

if __name__ == "__main__":
    sys.exit(main())
