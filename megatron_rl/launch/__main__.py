"""torchrun that returns the ranks' exit status, and does not restart ranks that ended on purpose.

    megatron-rl launch [--log-format json] --nproc_per_node 8
        -m megatron_rl.train --config FILE.toml ...

--log-format is of this command's own lines; the ranks have an option of their own.
examples/launch/train.sh calls it on every node, as `python -m megatron_rl.launch`.
"""

import sys

USAGE = "usage: megatron-rl launch TORCHRUN_OPTIONS -m MODULE ..."


def main() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}\ntorchrun --help lists its options.")
        return 0
    from megatron_rl.launch.torchrun import main as run  # imports torch: seconds

    return run()


if __name__ == "__main__":
    sys.exit(main())
