"""The referee of training: transformers in float64, losses as the papers print them, Adam as its
paper prints it.

Nothing here is shared with megatron_rl but the records that describe a response.  A step of N
mini-batches: log pi_old of every response under the step's first weights, then one update per
mini-batch.  Gradients and weights come under HF names.
Shapes: S tokens of a sequence, n response tokens, E experts, K top-k.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.batch.pack import Sample
from megatron_rl.records import Rollout
from tests.families import expert_calls, load_reference

BETA1, BETA2 = 0.9, 0.95


@dataclass(frozen=True)
class Recipe:
    """How the step is trained.

    eps is large so that Adam's division stays well-conditioned where a gradient is almost 0.
    """

    loss: str = "minirl"
    replay: str = "R3"
    temperature: float = 0.7
    lr: float = 1e-3
    eps: float = 1e-4
    weight_decay: float = 0.1
    clip_grad: float = 0.5


@dataclass
class Outcome:
    """gradients: of each update, after clipping by the norm; norms: before it; weights: at the end.

    clipped, truncated: tokens without gradient because of M_t (or a PPO clip), tokens whose weight
    was bounded;
    margin: the smallest distance of any ratio from the bound that decides on it: none may lie
    within rounding."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    clipped: int = 0
    truncated: int = 0
    margin: float = float("inf")


EPISODES = {2: 2, 9: 3, 15: 2}  # sequence -> how many, with those before it, are one episode


def make_samples(
    count: int, *, vocab_size: int, num_layers: int, num_experts: int, top_k: int, seed: int = 0
) -> list[Sample]:
    """Responses of `count` random sequences with random routes (none for a dense model), log mu and
    advantages of both signs.

    Some are episodes of several sequences: see EPISODES.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        size, prompt = int(rng.integers(6, 13)), 3
        routes = None
        if num_experts:
            scores = rng.random((size - 1, num_layers, num_experts))
            routes = np.argsort(scores, axis=-1)[..., :top_k].astype(np.uint8)
        rollout = Rollout(
            id=f"r{index}",
            tokens=rng.integers(2, vocab_size, size),
            prompt_length=prompt,
            rollout_logprobs=(-5 + 1.5 * rng.standard_normal(size - prompt)).astype(np.float32),
            routed_experts=routes,
            finish_reason="stop",
            policy_versions=np.zeros(size - prompt, np.int32),
        )
        samples.append(Sample(rollout, float(rng.choice([-1.5, -0.6, 0.8, 1.7]))))
    for last, size in sorted(EPISODES.items(), reverse=True):
        if last < count:
            *earlier, end = samples[last - size + 1 : last + 1]
            episode = end.rollout.with_episode(earlier=tuple(sample.rollout for sample in earlier))
            samples[last - size + 1 : last + 1] = [
                replace(end, rollout=episode.named(end.rollout.id))
            ]
    return samples


def train(path: Path, mini_batches: Sequence[Sequence[Sample]], recipe: Recipe) -> Outcome:
    """One step of len(mini_batches) updates."""
    model = load_reference(path, torch.float64)
    outcome = Outcome()
    old = old_pass(model, mini_batches, recipe)
    adam = Adam(model, recipe)
    for batch in mini_batches:
        backward(model, batch, old, recipe, outcome)
        outcome.norms.append(clip_gradient(model, recipe.clip_grad))
        outcome.gradients.append(saved(model, gradients=True))
        adam.step()
    outcome.weights = saved(model)
    return outcome


OldLogprobs = dict[str, tuple[Tensor, list[Tensor] | None]]
"""Sequence -> (log pi_old, the experts that the updates replay)."""


@torch.no_grad()
def old_pass(
    model: torch.nn.Module, mini_batches: Sequence[Sequence[Sample]], recipe: Recipe
) -> OldLogprobs:
    old: OldLogprobs = {}
    for rollout in (
        part for batch in mini_batches for sample in batch for part in sample.rollout.sequences
    ):
        given = rollout_routes(rollout) if recipe.replay == "R3" else None
        logprobs, chosen = response_logprobs(model, rollout, recipe.temperature, given)
        replayed = {"none": None, "R2": chosen, "R3": given}[recipe.replay]
        old[rollout.id] = logprobs, replayed
    return old


def backward(
    model: torch.nn.Module,
    batch: Sequence[Sample],
    old: OldLogprobs,
    recipe: Recipe,
    outcome: Outcome,
) -> None:
    """Leave the gradient of one mini-batch in the model's parameters."""
    terms = []
    for sample, rollout in ((whole, part) for whole in batch for part in whole.rollout.sequences):
        its_old, replayed = old[rollout.id]
        logprobs, _ = response_logprobs(model, rollout, recipe.temperature, replayed)
        mu = torch.from_numpy(rollout.rollout_logprobs).double()
        advantage = np.float32(sample.advantage).item()
        terms.append(Terms(logprobs, its_old, mu, advantage, sample.rollout.id))
    model.zero_grad()
    LOSSES[recipe.loss](terms, outcome).backward()


def response_logprobs(
    model: torch.nn.Module, rollout: Rollout, temperature: float, routes: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """(log pi [n] of the response's tokens, the ids [S, K] that each MoE layer used)."""
    logprobs, used = response_distributions(model, rollout, temperature, routes)
    tokens = torch.from_numpy(rollout.tokens[rollout.prompt_length :])
    return logprobs.gather(1, tokens[:, None])[:, 0], used


def response_distributions(
    model: torch.nn.Module, rollout: Rollout, temperature: float, routes: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """(log pi [n, V] in the places of the response's tokens, the ids that each layer used)."""
    tokens = torch.from_numpy(rollout.tokens)
    used: dict[int, list[Tensor]] = {}
    with forced(model, routes), expert_calls(model, used):
        logits = model(tokens[None], use_cache=False).logits[0]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    places = slice(rollout.prompt_length - 1, -1)
    return logprobs[places], [ids[0] for _, ids in sorted(used.items())]


def rollout_routes(rollout: Rollout) -> list[Tensor]:
    """int64 [S - 1, K] per MoE layer."""
    return [
        torch.from_numpy(layer.astype(np.int64)) for layer in rollout.routed_experts.swapaxes(0, 1)
    ]


@contextmanager
def forced(model: torch.nn.Module, routes: list[Tensor] | None):
    """Give every layer's experts these ids, with the gate weights that the router's live scores
    have for them.

    Rows beyond the given ones (the last token, of which no server sends a route) keep the router's
    choice.
    """
    with ExitStack() as stack:
        blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        for block, ids in zip(blocks, routes or [], strict=bool(routes)):
            stack.callback(
                block.experts.register_forward_pre_hook(force(model.config, block.gate, ids)).remove
            )
        yield


def force(config, gate: torch.nn.Module, ids: Tensor) -> Callable:
    """sigmoid scores for DeepSeek-V3 and GLM-4.5, softmax for all others; divided by their sum
    where the family does so.
    """

    def before(_, args):
        hidden, live, weights = args
        chosen = torch.cat([ids, live[len(ids) :]])
        logits = hidden.flatten(0, -2) @ gate.weight.T
        scores = (
            logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)
        )
        forced_weights = scores.gather(1, chosen)
        if getattr(config, "norm_topk_prob", config.model_type == "mixtral"):
            forced_weights = forced_weights / forced_weights.sum(-1, keepdim=True)
        return (
            hidden,
            chosen,
            (forced_weights * getattr(config, "routed_scaling_factor", 1.0)).to(weights.dtype),
        )

    return before


@dataclass(frozen=True)
class Terms:
    """One sequence: log pi (with gradient), log pi_old, log mu [n], A, and the episode that it is
    of, which is one response.
    """

    logprobs: Tensor
    old: Tensor
    mu: Tensor
    advantage: float
    episode: str


def lengths(sequences: Sequence[Terms]) -> Counter[str]:
    """Tokens of each response, over all its sequences."""
    found: Counter[str] = Counter()
    for r in sequences:
        found[r.episode] += len(r.old)
    return found


def minirl(responses: Sequence[Terms], outcome: Outcome) -> Tensor:
    """arXiv 2512.01374, Eq. 7, eps 0.2 and 0.27, weight truncated at 5; to be minimised."""
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        weight, ratio = (r.logprobs.detach() - r.mu).exp(), (r.logprobs.detach() - r.old).exp()
        dropped = dropped_tokens(ratio, r.advantage, 0.8, 1.27, outcome)
        outcome.truncated += int((weight > 5).sum())
        outcome.margin = min(outcome.margin, float((weight / 5 - 1).abs().min()))
        total = (
            total
            + (torch.where(dropped, 0.0, weight.clamp(max=5.0)) * r.advantage * r.logprobs).sum()
        )
    return -total / len(lengths(responses))


def grpo(responses: Sequence[Terms], outcome: Outcome) -> Tensor:
    """arXiv 2402.03300 without its KL: PPO's clip, the mean over each response's tokens."""
    sizes = lengths(responses)
    return -sum(ppo(r, 0.8, 1.2, outcome).sum() / sizes[r.episode] for r in responses) / len(sizes)


def dapo(responses: Sequence[Terms], outcome: Outcome) -> Tensor:
    """arXiv 2503.14476: PPO's clip with a higher upper bound, the mean over all tokens."""
    return -sum(ppo(r, 0.8, 1.28, outcome).sum() for r in responses) / sum(
        len(r.old) for r in responses
    )


def gspo(responses: Sequence[Terms], outcome: Outcome) -> Tensor:
    """arXiv 2507.18071: PPO's clip on the geometric mean of a sequence's ratios; sequences weigh by
    their tokens.
    """
    low, high = 1 - 3e-4, 1 + 4e-4
    total, sizes = torch.zeros((), dtype=torch.float64), lengths(responses)
    for r in responses:
        ratio = (r.logprobs - r.old).mean().exp()
        dropped_tokens(ratio.detach()[None], r.advantage, low, high, outcome)
        share = len(r.old) / sizes[r.episode]
        total = total + share * torch.minimum(
            ratio * r.advantage, ratio.clamp(low, high) * r.advantage
        )
    return -total / len(sizes)


def cispo(responses: Sequence[Terms], outcome: Outcome) -> Tensor:
    """arXiv 2506.13585: REINFORCE with the clipped ratio as its weight, the mean over all
    tokens.
    """
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        ratio = (r.logprobs.detach() - r.old).exp()
        outcome.truncated += int(((ratio < 0.8) | (ratio > 1.27)).sum())
        total = total + (ratio.clamp(0.8, 1.27) * r.advantage * r.logprobs).sum()
    return -total / sum(len(r.old) for r in responses)


LOSSES = {"minirl": minirl, "grpo": grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}


def ppo(r: Terms, low: float, high: float, outcome: Outcome) -> Tensor:
    """min(r A, clip(r, low, high) A) per token."""
    ratio = (r.logprobs - r.old).exp()
    dropped_tokens(ratio.detach(), r.advantage, low, high, outcome)
    return torch.minimum(ratio * r.advantage, ratio.clamp(low, high) * r.advantage)


def dropped_tokens(
    ratio: Tensor, advantage: float, low: float, high: float, outcome: Outcome
) -> Tensor:
    """Where the ratio has moved as far as it may in the direction of the advantage; counted."""
    bound = high if advantage > 0 else low
    dropped = ratio > bound if advantage > 0 else ratio < bound
    outcome.clipped += int(dropped.sum())
    outcome.margin = min(outcome.margin, float((ratio / bound - 1).abs().min()))
    return dropped


def clip_gradient(model: torch.nn.Module, limit: float) -> float:
    """Scale all gradients so that their norm is at most `limit`; returns the norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(sum(g.square().sum() for g in gradients).sqrt())
    for g in gradients:
        g.mul_(min(1.0, limit / (norm + 1e-6)))  # 1e-6 as megatron-core and torch have it
    return norm


class Adam:
    """Kingma and Ba's algorithm 1 with decoupled weight decay (Loshchilov and Hutter); none for
    norms and biases.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe) -> None:
        self.parameters, self.recipe, self.t = list(model.parameters()), recipe, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        recipe = self.recipe
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            g = torch.zeros_like(p) if p.grad is None else p.grad
            m.copy_(BETA1 * m + (1 - BETA1) * g)
            v.copy_(BETA2 * v + (1 - BETA2) * g**2)
            step = m / (1 - BETA1**self.t) / ((v / (1 - BETA2**self.t)).sqrt() + recipe.eps)
            decay = recipe.weight_decay if p.dim() > 1 else 0.0
            p.copy_(p - recipe.lr * (step + decay * p))


@torch.no_grad()
def saved(model: torch.nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """The model's weights, or their gradients in their place, float64, under the names of its HF
    files.
    """
    values = [p.data for p in model.parameters()]
    if gradients:
        for p in model.parameters():
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value
    return found


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, the norm of its error relative to its own norm; of one that should be 0,
    relative to 1.
    """
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    return {
        name: float(
            (found[name].double() - tensor).norm() / (tensor.norm() if tensor.norm() > 0 else 1.0)
        )
        for name, tensor in expected.items()
    }
