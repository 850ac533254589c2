"""The same loss and gradient however the mini-batch is ordered, packed, padded or cut into
micro-batches.

Ranks: tests/dist/test_loss.py.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.loss import PRESETS
from tests.unit.loss.cases import counts, loss_of, pack, prepare, responses, run, run_whole

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(0, 10_000), lengths_lists, st.sampled_from(sorted(PRESETS)))
def test_order_packing_and_splitting_do_not_matter(data, seed, lengths, name):
    """The sequences of an episode may lie in several micro-batches."""
    episodes = data.draw(
        st.lists(st.sampled_from([None, 0, 1]), max_size=len(lengths)), label="episodes"
    )
    batch, config = responses(seed, lengths, episodes=episodes), loss_of(name)
    total, gradients = run_whole(batch, config, prompts=0, pads=0)
    order = data.draw(st.permutations(range(len(batch))), label="order")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch))), label="cuts") | {len(batch)})
    got_total, start = torch.zeros((), dtype=torch.float64), 0
    for cut in cuts:
        part = [batch[i] for i in order[start:cut]]
        packing = data.draw(
            st.fixed_dictionaries({"prompts": st.integers(0, 3), "pads": st.integers(0, 5)}),
            label="packing",
        )
        if part:
            packed = pack(part, **packing)
            share, gradient, _ = run(packed, config, **counts(batch))
            got_total += share
            for rows, index in zip(packed.rows, order[start:cut], strict=True):
                torch.testing.assert_close(gradient[rows], gradients[index], rtol=1e-12, atol=1e-12)
            assert (gradient[~packed.mask] == 0).all()
        start = cut
    torch.testing.assert_close(got_total, total, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from(sorted(PRESETS)))
def test_tokens_of_a_response_may_lie_anywhere(seed, name):
    """Sequence sums go by ids, not by place: shuffled rows give shuffled gradients."""
    batch = responses(seed)
    config = loss_of(name)
    packed = pack(prepare(batch, config))
    total, gradient, _ = run(packed, config, **counts(batch))
    order = torch.randperm(len(packed.mask), generator=torch.Generator().manual_seed(seed))
    for field in ("logprobs", "old", "mu", "advantages", "mask", "selected"):
        setattr(packed, field, getattr(packed, field)[order])
    s = packed.sequences
    packed.sequences = type(s)(s.ids[order], s.count, s.lengths[order])
    shuffled, shuffled_gradient, _ = run(packed, config, **counts(batch))
    torch.testing.assert_close(shuffled, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-12, atol=1e-12)


def test_scale_is_a_plain_factor():
    for name in PRESETS:
        total, gradients = run_whole(responses(0), loss_of(name))
        scaled, scaled_gradients = run_whole(responses(0), loss_of(name, scale=0.25))
        torch.testing.assert_close(scaled, 0.25 * total)
        torch.testing.assert_close(scaled_gradients[0], 0.25 * gradients[0])
