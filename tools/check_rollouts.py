"""Thin command: check saved rollouts.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.check_rollouts.check_rollouts import main

if __name__ == "__main__":
    sys.exit(main())
