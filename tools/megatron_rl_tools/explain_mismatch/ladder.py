"""The ladder of comparisons: as they are, same routes, same gate weights, same settings, same
sampling, same precision, transformers.

Each rung removes one difference between the engines; what it takes off KL(mu, pi_old) is its share.
Trials run only if the two differ by more than rounding: a healthy pair costs three forwards.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config.parity_limits import ASSUMED_DTYPE, LIMITS
from megatron_rl.models.spec import load_hf_config
from megatron_rl.records import Rollout
from megatron_rl_tools.explain_mismatch import evidence as ev
from megatron_rl_tools.explain_mismatch import weights
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.referee import referee_evidence
from megatron_rl_tools.explain_mismatch.server_evidence import (
    config_evidence,
    fresh_evidence,
    weight_evidence,
)
from megatron_rl_tools.explain_mismatch.server_side import Fresh, ServerSide
from megatron_rl_tools.explain_mismatch.trainer_side import (
    Half,
    TrainerSide,
    another_trainer,
    linked_checkpoint,
    logprobs,
    with_routes,
)
from megatron_rl_tools.explain_mismatch.trials import GATES, TRIALS, Trial, live_from
from megatron_rl_tools.explain_mismatch.verdicts import Verdict, verdicts_of

EXACT_LIMIT = LIMITS["float32", "float32"].warn_logprob_diff
ROUNDING_TIMES = 4.0
"""The limit is this many times the difference between transformers in the pair's precisions and in
float32.
"""
NOT_ON_CPU = "limits were measured on the CPU, not on {}: differences near a limit say little"
SEARCHES = 10
"""Steps of the search for a smooth trial's best value."""
LEAST_KL = 1e-10
"""A smaller KL on the first rung is rounding in float32, and no rung has a share of it."""
LEAST_OVERLAP = 0.95
"""Trials run below this overlap of experts, even if log-probs agree."""


@dataclass(frozen=True)
class Rung:
    """One comparison, with the differences of all rungs above removed."""

    name: str
    what: str
    kl: float
    """KL(mu, pi) that remains on this rung, in nats."""
    difference: float
    """Mean of |log mu - log pi| that remains, in nats."""
    share: float
    """Share of the first rung's KL that this rung no longer has."""


@dataclass(frozen=True)
class Explanation:
    """The result of the ladder."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    """() for a healthy pair."""
    rungs: tuple[Rung, ...]
    layers: tuple[dict[str, float], ...] = ()
    """The table of evidence.flip_evidence."""
    places: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Position of the row that predicts each sampled token."""
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """|log mu - log pi| of each sampled token on the first rung, in nats."""


class Ladder:
    """Collects the evidence for one trainer and the rollouts of one server.

    fresh: the same tokens in one forward of the server, if there is a server.
    is_refereed: whether to ask transformers.
    """

    def __init__(
        self,
        trainer: TrainerSide,
        rollouts: Sequence[Rollout],
        *,
        fresh: Sequence[Fresh] | None = None,
        server: ServerSide | None = None,
        server_dtype: str = "float32",
        is_refereed: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        self.trainer, self.server, self.fresh, self.log = trainer, server, fresh, log
        self.rollouts = list(rollouts)
        # transformers has no kept sets
        is_plain = all(rollout.sampling_mask is None for rollout in rollouts)
        self.is_refereed = is_refereed and is_plain
        self.mu = [rollout.rollout_logprobs for rollout in rollouts]
        self.has_routes = all(rollout.routed_experts is not None for rollout in rollouts)
        self.server_dtype = (
            server_dtype if server_dtype in ("float32", "bfloat16", "float16") else ASSUMED_DTYPE
        )
        self.evidence = Evidence()
        self.rungs: list[Rung] = []
        self.replaced: Mapping[str, torch.Tensor] = {}
        self.truth: list[np.ndarray] | None = None

    def climb(self) -> Explanation:
        """Climb every rung, then read the verdict."""
        cfg, spec = self.trainer.cfg, self.trainer.spec
        self.evidence.add("model", rope_theta=spec.rope_theta, rms_eps=spec.rms_eps)
        self.evidence.add("model", scaling_factor=spec.router.scaling_factor or 1.0)
        self.evidence.add("sampling", temperature=cfg.rollout.temperature)
        self.evidence.add("dtype", trainer=cfg.model.dtype, server=self.server_dtype)
        self.evidence.add("dtype", differ=float(cfg.model.dtype != self.server_dtype))
        self.evidence.add("server", unusual="not known")
        live = self.trainer.forward(self.rollouts, replay=False)
        self.rung("as they are", "each engine with its own routes", live)
        self.measure("live", live)
        self.evidence.update(ev.route_evidence(self.rollouts, live))
        self.evidence.update(ev.logprob_evidence(self.rollouts, live))
        replayed = self.replayed(live)
        self.read_server(live)
        self.ask_transformers(live)
        self.set_limit()
        num_layers = len(spec.moe_layers)
        flips, layers = ev.flip_evidence(self.rollouts, replayed, num_layers=num_layers)
        self.evidence.update(flips)
        facts = self.server.facts if self.server else None
        borders = [facts.page_size, facts.chunk_size or 0] if facts else []
        self.evidence.update(ev.position_evidence(self.rollouts, live, borders))
        number = self.evidence.number
        overlap = number("routes.overlap")
        # a healthy pair needs no further forward
        if self.differs:
            self.bisect_routes()
        if self.differs or (overlap is not None and overlap < LEAST_OVERLAP):
            self.run_trials()
        if self.differs or number("dtype.differ") or number("weights.wrong"):
            self.other_trainers()
        if self.truth is not None:
            what = "the server against transformers in float32"
            self.rungs.append(self.make_rung("transformers", what, self.truth))
        sizes = [mu - half.logprobs for mu, half in zip(self.mu, live, strict=True)]
        return Explanation(
            evidence=self.evidence,
            verdicts=tuple(verdicts_of(self.evidence)),
            rungs=tuple(self.rungs),
            layers=tuple(layers),
            places=np.concatenate([rollout.sampled - 1 for rollout in self.rollouts]),
            sizes=np.abs(np.concatenate(sizes)),
        )

    # Rungs

    def replayed(self, live: Sequence[Half]) -> Sequence[Half]:
        """Replay the server's routes, and again with a shift of rows or layers undone."""
        if not self.has_routes or not self.trainer.spec.moe_layers:
            self.measure("replay", live)
            return live
        halves = self.trainer.forward(self.rollouts, replay=True)
        self.rung("same routes", "the trainer replays the server's experts", halves)
        self.measure("replay", halves)
        rows = int(self.evidence.get("routes.row_shift", 0))
        layers = int(self.evidence.get("routes.layer_shift", 0))
        if rows or layers:
            served = [ids for r in self.rollouts if (ids := r.routed_experts) is not None]
            shifted = [shifted_back(ids, rows, layers) for ids in served]
            mended = with_routes(self.rollouts, shifted, lambda flags: shifted_back(flags, rows, 0))
            again = self.trainer.forward(mended, replay=True)
            self.evidence.add("kl", routes_mended=ev.kl(self.mu, logprobs(again)))
        return halves

    def bisect_routes(self) -> None:
        """Search how many layers, from the first, must replay the server's routes to take off half
        of what replay in all layers does.
        """
        live, replayed = self.evidence.number("kl.live"), self.evidence.number("kl.replay")
        layers = len(self.trainer.spec.moe_layers)
        if live is None or replayed is None or layers < 2 or replayed > 0.5 * live:
            return

        def kl_below(layer: int) -> float:
            halves = self.trainer.forward(self.rollouts, replay=True, edit=live_from(layer))
            return ev.kl(self.mu, logprobs(halves))

        # bisection: the KL falls as more layers replay
        middle = (live + replayed) / 2
        place = bisect_left(range(layers), True, key=lambda layer: kl_below(layer) <= middle)
        self.evidence.add("routes", half_layers=float(place), layers=float(layers))

    def read_server(self, live: Sequence[Half]) -> None:
        """Compare what the server reports: settings, config.json, checksums, and the same tokens
        without its prefix cache.
        """
        if self.server is None:
            return
        facts = self.server.facts
        self.evidence.add("server", weight_version=facts.info.weight_version)
        self.evidence.add("server", version=facts.info.version)
        self.evidence.add("server", unusual="; ".join(facts.unusual) or "none")
        self.evidence.update(config_evidence(self.trainer.cfg.model.path, facts))
        if self.fresh is not None:
            temperature, dtype = self.trainer.cfg.rollout.temperature, self.server_dtype
            again = fresh_evidence(
                self.rollouts, self.fresh, live, temperature=temperature, server_dtype=dtype
            )
            self.evidence.update(again)
        self.log("comparing checksums of the weights")
        comparison = weights.compare_weights(
            self.trainer,
            self.server.checksums(),
            getattr(torch, self.server_dtype),
            facts.weights_path,
        )
        self.evidence.update(weight_evidence(comparison))
        self.replaced = comparison.replaced

    def ask_transformers(self, live: Sequence[Half]) -> None:
        if not self.is_refereed:
            return
        self.log("asking transformers")
        device = self.trainer.parallel.device.type
        opinion, self.truth = referee_evidence(
            self.trainer.cfg,
            self.rollouts,
            live,
            fresh=self.fresh,
            server_dtype=self.server_dtype,
            device=device,
        )
        self.evidence.update(opinion)

    def set_limit(self) -> None:
        """Set the limits above which the pair differs by more than rounding."""
        floor = self.evidence.number("floor.diff")
        if floor is None:  # without a referee, the limits of the parity check
            dtypes = self.trainer.cfg.model.dtype, self.server_dtype
            limits = LIMITS.get(dtypes, LIMITS["bfloat16", "bfloat16"])
            self.evidence.add("limit", diff=limits.warn_logprob_diff)
        else:
            self.evidence.add("limit", diff=max(EXACT_LIMIT, ROUNDING_TIMES * floor))
        self.evidence.add("limit", exact=EXACT_LIMIT)
        served = self.server.facts.device if self.server else "cpu"
        if devices := {self.trainer.parallel.device.type, served} - {"cpu"}:
            self.evidence.add("limit", note=NOT_ON_CPU.format(", ".join(sorted(devices))))
        live, replayed = self.evidence.number("diff.live"), self.evidence.number("diff.replay")
        assert live is not None and replayed is not None
        # replaying wrong routes makes a difference of its own
        self.evidence.add("diff", worst=live if self.has_shift else max(live, replayed))

    @property
    def has_shift(self) -> bool:
        """Return whether the server's routes belong to other rows or layers."""
        shifts = (self.evidence.get(f"routes.{axis}_shift") for axis in ("row", "layer"))
        return any(shifts)

    @property
    def differs(self) -> bool:
        worst, limit = self.evidence.number("diff.worst"), self.evidence.number("limit.diff")
        return worst is not None and limit is not None and worst > limit

    def run_trials(self) -> None:
        """Run every trial alone, on top of the server's routes if they are right.

        The best trial of a rung becomes the rung.
        """
        trusted = self.has_routes and not self.has_shift
        base = self.evidence.number("diff.replay" if trusted else "diff.live")
        self.evidence.add("diff", base=base)
        best: dict[str, tuple[str, list[Half]]] = {}
        for trial in TRIALS:
            self.log(f"trying {trial.name}")
            # replayed routes would hide what a bias changes
            outcome = self.run_trial(trial, replay=trusted and trial.name != "no_bias")
            if outcome is None:
                continue
            value, halves = outcome
            name, pi = f"trial.{trial.name}", logprobs(halves)
            self.evidence.add(name, value=value, kl=ev.kl(self.mu, pi))
            self.evidence.add(name, diff=ev.difference(self.mu, pi))
            if self.has_routes and self.trainer.spec.moe_layers:
                pairs = zip(self.rollouts, halves, strict=True)
                known = [(ev.served_routes(rollout), half.routes) for rollout, half in pairs]
                overlaps = [ev.overlap(ids, live) for ids, live in known if ids is not None]
                self.evidence.add(name, overlap=float(np.mean(overlaps)))
            before = best.get(trial.rung)
            if before is None or self.distance(halves) < self.distance(before[1]):
                has_value = trial.is_smooth or trial.rung != GATES
                what = f"{trial.name} = {value:g}" if has_value else trial.name
                best[trial.rung] = what, halves
        for rung, (what, halves) in best.items():
            self.rung(rung, what, halves)

    def run_trial(self, trial: Trial, *, replay: bool) -> tuple[float, list[Half]] | None:
        """Return (best value, the trainer's half with it), or None if the trial does not apply."""

        def run(value: float) -> list[Half]:
            return self.trainer.forward(self.rollouts, replay=replay, edit=trial.edit(value))

        tried = {value: run(value) for value in trial.values(self.trainer.spec)}
        if not tried:
            return None
        for _ in range(SEARCHES if trial.is_smooth else 0):
            # halve, on a log scale, the wider of the two gaps beside the best value
            values = sorted(tried)
            place = values.index(min(tried, key=lambda value: self.distance(tried[value])))
            near = [
                (abs(values[at] - values[place]), values[at])
                for at in (place - 1, place + 1)
                if 0 <= at < len(values)
            ]
            between = (max(near)[1] * values[place]) ** 0.5
            tried[between] = run(between)
        best = min(tried, key=lambda value: self.distance(tried[value]))
        return best, tried[best]

    def other_trainers(self) -> None:
        """Compare a trainer in the server's precision, one with its config.json, and one with its
        checkpoint.
        """
        trainer, facts = self.trainer, None if self.server is None else self.server.facts
        cfg, parallel = trainer.cfg, trainer.parallel
        if self.evidence.number("dtype.differ") and self.server_dtype != "float16":
            with another_trainer(cfg, parallel, dtype=self.server_dtype) as other:
                halves = other.forward(self.rollouts, replay=self.has_routes)
            what = f"the trainer in {self.server_dtype}, with the server's routes"
            self.rung("same precision", what, halves)
            self.measure("same_precision", halves)
        if facts is None:
            return
        if self.evidence.number("config.differ"):
            with temporary_checkpoint() as path:
                linked_checkpoint(path, cfg.model.path, facts.config)
                with another_trainer(cfg, parallel, path=path) as other:
                    halves = other.forward(self.rollouts, replay=False)
            what = "the trainer's tensors with the server's config.json"
            self.rung("same config.json", what, halves)
            self.measure("their_config", halves)
        is_loaded = self.evidence.number("weights.is_loaded") and facts.weights_path is not None
        if not is_loaded and not self.replaced:
            return
        with temporary_checkpoint() as path:
            if is_loaded:
                assert facts.weights_path is not None
                what = f"the trainer with the server's checkpoint {facts.weights_path}"
                linked_checkpoint(path, facts.weights_path, load_hf_config(cfg.model.path))
            else:
                what = "the trainer with its tensors changed as the server's are"
                weights.changed_checkpoint(path, cfg.model.path, self.replaced)
            with another_trainer(cfg, parallel, path=path) as other:
                halves = other.forward(self.rollouts, replay=False)
        self.rung("same weights", what, halves)
        self.measure("their_weights", halves)

    # Helpers

    def rung(self, name: str, what: str, halves: Sequence[Half]) -> None:
        self.rungs.append(self.make_rung(name, what, logprobs(halves)))

    def make_rung(self, name: str, what: str, pi: Sequence[np.ndarray]) -> Rung:
        value = ev.kl(self.mu, pi)
        first = self.rungs[0].kl if self.rungs else value
        share = 1 - value / first if first > LEAST_KL else 0.0
        return Rung(name, what, value, ev.difference(self.mu, pi), share)

    def measure(self, name: str, halves: Sequence[Half]) -> None:
        self.evidence.add("kl", **{name: ev.kl(self.mu, logprobs(halves))})
        self.evidence.add("diff", **{name: ev.difference(self.mu, logprobs(halves))})

    def distance(self, halves: Sequence[Half]) -> float:
        return ev.difference(self.mu, logprobs(halves))


@contextmanager
def temporary_checkpoint() -> Iterator[Path]:
    """A path for a checkpoint that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="explain_mismatch_") as folder:
        yield Path(folder) / "model"


def shifted_back(served: np.ndarray, rows: int, layers: int) -> np.ndarray:
    """Undo a shift of rows (the row at the end is repeated) and of layers."""
    served = served[np.clip(np.arange(len(served)) + rows, 0, len(served) - 1)]
    return np.roll(served, -layers, axis=1) if layers else served
