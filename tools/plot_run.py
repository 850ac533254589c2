"""Thin command: report of runs.  The code is in megatron_rl/tools."""

from megatron_rl.tools.plot_run import main

if __name__ == "__main__":
    main()
