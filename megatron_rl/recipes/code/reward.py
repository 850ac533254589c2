"""The reward: 1 where the code of a response passes all tests of its problem, else 0.

The code is the last block that is marked as Python, else the last without a mark.  It runs in a
sandbox, without a network and without files; where no sandbox works, the run stops before it
trains.  The tests run in another one, so that code cannot pass by an exit, by patched names or by
objects that equal everything.
"""

from megatron_rl.reward import Episode, Score
from megatron_rl.reward.code_tests import CodeTests
from megatron_rl.reward.sandbox.box import Limits

# all tests of a response together; memory is that of each process
run_tests = CodeTests(Limits(seconds=10.0, memory_mib=512, processes=8, box_mib=16))


def score(episode: Episode) -> Score:
    return run_tests(episode)
