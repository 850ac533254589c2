"""python -m megatron_rl.launch: torchrun that keeps the ranks' exit statuses."""

import sys

from megatron_rl.launch.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
