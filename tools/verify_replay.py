"""Thin command: prove routing replay in a layout.  The code is in megatron_rl/tools."""

import sys

from megatron_rl.tools.verify_replay.verify_replay import main

if __name__ == "__main__":
    sys.exit(main())
