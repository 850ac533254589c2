"""Thin command: propose layouts.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.plan_layouts import main

if __name__ == "__main__":
    sys.exit(main())
