"""python -m megatron_rl.launch: torchrun that returns the exit status of the ranks."""

import sys

from megatron_rl.launch.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
