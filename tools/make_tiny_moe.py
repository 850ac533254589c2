"""Thin command: make the tiny checkpoint of the demo.  The code is in megatron_rl/tools."""

from megatron_rl.tools.make_tiny_moe import main

if __name__ == "__main__":
    main()
