"""The ladder: as they are, same routes, same gate weights, same settings, same sampling, same
precision, transformers.

Each rung removes one difference between the engines; what it takes off KL(mu, pi_old) is its share.
Trials run only where the two differ by more than rounding: a healthy pair costs three forwards.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
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
from megatron_rl_tools.explain_mismatch.referee import Opinion, ask_referee
from megatron_rl_tools.explain_mismatch.server_evidence import config_evidence, weight_evidence
from megatron_rl_tools.explain_mismatch.server_side import Fresh, ServerSide
from megatron_rl_tools.explain_mismatch.trainer_side import (
    Half,
    TrainerSide,
    another_trainer,
    linked_checkpoint,
    with_routes,
)
from megatron_rl_tools.explain_mismatch.trials import GATES, TRIALS, Trial, live_from
from megatron_rl_tools.explain_mismatch.verdicts import Verdict, verdicts_of

EXACT_LIMIT = LIMITS["float32", "float32"].warn_logprob_diff
ROUNDING_TIMES = 4.0
"""A pair may differ by this many times what transformers differs by between its precisions and
float32.
"""
NOT_ON_CPU = "limits were measured on the CPU, not on {}: differences near a limit say little"
SEARCHES = 10
LEAST_KL = 1e-10
"""Of the first rung; a smaller one is rounding in float32, and has no shares."""
LEAST_OVERLAP = 0.95
"""Of experts; below it trials run although log-probs may agree."""


@dataclass(frozen=True)
class Rung:
    """kl, difference: of what is left on this rung; share: of the first rung's KL that this one
    took off.
    """

    name: str
    what: str
    kl: float
    difference: float
    share: float


@dataclass(frozen=True)
class Explanation:
    """verdicts: () for a healthy pair.  layers: see evidence.flip_evidence; places, sizes: position
    and |log mu - log pi| of every sampled token, as they are."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    rungs: tuple[Rung, ...]
    layers: tuple[dict[str, float], ...] = ()
    places: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Ladder:
    """Collects the evidence for one trainer and the rollouts of one server.

    fresh: the same tokens in one forward of the server, where there is a server; is_refereed:
    whether to ask transformers.
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
        # transformers knows no kept sets
        self.is_refereed = is_refereed and all(
            rollout.sampling_mask is None for rollout in rollouts
        )
        self.mu = [rollout.rollout_logprobs for rollout in rollouts]
        self.has_routes = all(rollout.routed_experts is not None for rollout in rollouts)
        self.server_dtype = (
            server_dtype if server_dtype in ("float32", "bfloat16", "float16") else ASSUMED_DTYPE
        )
        self.found = Evidence()
        self.rungs: list[Rung] = []
        self.replaced: Mapping[str, torch.Tensor] = {}
        self.truth: list[np.ndarray] | None = None

    def climb(self) -> Explanation:
        """Every rung, then the verdict."""
        cfg, spec = self.trainer.cfg, self.trainer.spec
        self.found.add("model", rope_theta=spec.rope_theta, rms_eps=spec.rms_eps)
        self.found.add("model", scaling_factor=spec.router.scaling_factor or 1.0)
        self.found.add("sampling", temperature=cfg.rollout.temperature)
        self.found.add("dtype", trainer=cfg.model.dtype, server=self.server_dtype)
        self.found.add("dtype", differ=float(cfg.model.dtype != self.server_dtype))
        self.found.add("server", unusual="not known")
        live = self.trainer.forward(self.rollouts, replay=False)
        self.rung("as they are", "each engine with its own routes", live)
        self.measure("live", live)
        self.found.update(ev.route_evidence(self.rollouts, live))
        self.found.update(ev.logprob_evidence(self.rollouts, live))
        replayed = self.replayed(live)
        self.read_server(live)
        self.ask_transformers(live)
        self.set_limit()
        flip_found, layers = ev.flip_evidence(
            self.rollouts, replayed, num_layers=len(spec.moe_layers)
        )
        self.found.update(flip_found)
        borders = (
            [self.server.facts.page_size, self.server.facts.chunk_size or 0] if self.server else []
        )
        self.found.update(ev.position_evidence(self.rollouts, live, borders))
        overlap = self.found.number("routes.overlap")
        if self.differs:
            self.bisect_routes()
        if self.differs or (overlap is not None and overlap < LEAST_OVERLAP):
            self.run_trials()
        if self.differs or self.found.number("dtype.differ") or self.found.number("weights.wrong"):
            self.other_trainers()
        if self.truth is not None:
            self.rungs.append(
                self.make_rung(
                    "transformers", "the server against transformers in float32", self.truth
                )
            )
        places = np.concatenate([rollout.sampled - 1 for rollout in self.rollouts])
        sizes = np.abs(np.concatenate([m - h.logprobs for m, h in zip(self.mu, live, strict=True)]))
        return Explanation(
            self.found,
            tuple(verdicts_of(self.found)),
            tuple(self.rungs),
            tuple(layers),
            places,
            sizes,
        )

    # Rungs

    def replayed(self, live: Sequence[Half]) -> Sequence[Half]:
        """With the server's routes; also as they would be if a shift of rows or layers were undone."""
        if not self.has_routes or not self.trainer.spec.moe_layers:
            self.measure("replay", live)
            return live
        halves = self.trainer.forward(self.rollouts, replay=True)
        self.rung("same routes", "the trainer replays the server's experts", halves)
        self.measure("replay", halves)
        rows, layers = (int(self.found.get(f"routes.{axis}_shift", 0)) for axis in ("row", "layer"))
        if rows or layers:
            served = [
                rollout.routed_experts
                for rollout in self.rollouts
                if rollout.routed_experts is not None
            ]
            mended = with_routes(self.rollouts, [shifted_back(ids, rows, layers) for ids in served])
            self.found.add(
                "kl",
                routes_mended=ev.kl(self.mu, logprobs(self.trainer.forward(mended, replay=True))),
            )
        return halves

    def bisect_routes(self) -> None:
        """How many layers, from the first, must replay the server's routes to take off half of what
        all of them do?
        """
        live, replayed = self.found.number("kl.live"), self.found.number("kl.replay")
        layers = len(self.trainer.spec.moe_layers)
        if live is None or replayed is None or layers < 2 or replayed > 0.5 * live:
            return

        def kl_below(layer: int) -> float:
            return ev.kl(
                self.mu,
                logprobs(self.trainer.forward(self.rollouts, replay=True, edit=live_from(layer))),
            )

        middle = (live + replayed) / 2
        place = bisect_left(range(layers), True, key=lambda layer: kl_below(layer) <= middle)
        self.found.add("routes", half_layers=float(place), layers=float(layers))

    def read_server(self, live: Sequence[Half]) -> None:
        """What the server reports: settings, config.json, checksums, and the same tokens without
        its prefix cache.
        """
        if self.server is None:
            return
        facts = self.server.facts
        self.found.add(
            "server", weight_version=facts.info.weight_version, version=facts.info.version
        )
        self.found.add("server", unusual="; ".join(facts.unusual) or "none")
        self.found.update(config_evidence(self.trainer.cfg.model.path, facts))
        if self.fresh is not None:
            self.compare_fresh(self.fresh, live)
        self.log("comparing checksums of the weights")
        dtype = getattr(torch, self.server_dtype)
        found = weights.compare_weights(
            self.trainer, self.server.checksums(), dtype, facts.weights_path
        )
        self.found.update(weight_evidence(found))
        self.replaced = found.replaced

    def compare_fresh(self, fresh: Sequence[Fresh], live: Sequence[Half]) -> None:
        """Sampled, partly from the prefix cache, against computed in one forward, whose log-probs
        are of temperature 1.
        """
        pairs = [(r.routed_experts, f.routes) for r, f in zip(self.rollouts, fresh, strict=True)]
        parts = []
        if routes := [(a, b.astype(np.int64)) for a, b in pairs if a is not None and b is not None]:
            # the prompt's rows alone: only they come from the cache
            spans = [rollout.prompt_length - 1 for rollout in self.rollouts]
            parts.append(
                np.mean(
                    [
                        1 - ev.overlap(a[:n], b[:n])
                        for (a, b), n in zip(routes, spans, strict=True)
                        if n
                    ]
                )
            )
        if self.trainer.cfg.rollout.temperature == 1.0:
            again = [each.logprobs for each in fresh]
            self.found.add("cache", logprob_diff=ev.difference(self.mu, again))
            self.found.add("kl", fresh=ev.kl(again, logprobs(live)))
        exact = self.server_dtype == "float32"
        self.found.add("cache", differ=float(max(parts)) if parts and exact else None)

    def ask_transformers(self, live: Sequence[Half]) -> None:
        """Which side is nearer to transformers, and how much precision alone explains."""
        cfg = self.trainer.cfg
        if not self.is_refereed:
            return
        self.log("asking transformers")
        device = self.trainer.parallel.device.type

        def ask(dtype: str) -> list[Opinion]:
            return ask_referee(
                cfg.model.path,
                self.rollouts,
                dtype=getattr(torch, dtype),
                device=device,
                temperature=cfg.rollout.temperature,
            )

        exact = ask("float32")
        truth = [each.logprobs for each in exact]
        self.found.add(
            "referee",
            server=ev.difference(self.mu, truth),
            trainer=ev.difference(logprobs(live), truth),
        )
        self.truth = truth
        floors = [0.0]
        for dtype in {cfg.model.dtype, self.server_dtype} - {"float32"}:
            rounded = ask(dtype)
            floors.append(ev.difference([each.logprobs for each in rounded], truth))
        self.found.add("floor", diff=max(floors))
        # float32 on both sides: transformers in place of the other one
        if self.found.number("dtype.differ"):
            mu, pi = (
                own if dtype == "float32" else truth
                for own, dtype in ((self.mu, self.server_dtype), (logprobs(live), cfg.model.dtype))
            )
            self.found.add("kl", exact=ev.kl(mu, pi))
        if self.fresh is not None and all(each.hidden is not None for each in self.fresh):
            theirs = np.concatenate([each.hidden for each in self.fresh if each.hidden is not None])
            ours = np.concatenate([each.hidden for each in exact])
            self.found.add("hidden", diff=float(np.abs(theirs - ours).mean() / np.abs(ours).mean()))

    def set_limit(self) -> None:
        floor = self.found.number("floor.diff")
        if floor is None:  # without a referee the limits of the parity check
            limits = LIMITS.get(
                (self.trainer.cfg.model.dtype, self.server_dtype), LIMITS["bfloat16", "bfloat16"]
            )
            self.found.add("limit", diff=limits.warn_logprob_diff)
        else:
            self.found.add("limit", diff=max(EXACT_LIMIT, ROUNDING_TIMES * floor))
        self.found.add("limit", exact=EXACT_LIMIT)
        devices = {
            self.trainer.parallel.device.type,
            self.server.facts.device if self.server else "cpu",
        } - {"cpu"}
        self.found.add(
            "limit", note=NOT_ON_CPU.format(", ".join(sorted(devices))) if devices else None
        )
        live, replayed = self.found.number("diff.live"), self.found.number("diff.replay")
        assert live is not None and replayed is not None
        routes_are_wrong = self.found.get("routes.row_shift") or self.found.get(
            "routes.layer_shift"
        )
        self.found.add("diff", worst=live if routes_are_wrong else max(live, replayed))

    @property
    def differs(self) -> bool:
        worst, limit = self.found.number("diff.worst"), self.found.number("limit.diff")
        return worst is not None and limit is not None and worst > limit

    def run_trials(self) -> None:
        """Each alone, on top of the server's routes where they are right; the best of a rung is the
        rung.
        """
        trusted = (
            self.has_routes
            and not self.found.get("routes.row_shift")
            and not self.found.get("routes.layer_shift")
        )
        self.found.add("diff", base=self.found.number("diff.replay" if trusted else "diff.live"))
        best: dict[str, tuple[str, list[Half]]] = {}
        for trial in TRIALS:
            self.log(f"trying {trial.name}")
            if (
                found := self.run_trial(trial, replay=bool(trusted and trial.name != "no_bias"))
            ) is None:
                continue
            value, halves = found
            self.found.add(f"trial.{trial.name}", value=value, kl=ev.kl(self.mu, logprobs(halves)))
            self.found.add(f"trial.{trial.name}", diff=ev.difference(self.mu, logprobs(halves)))
            if self.has_routes and self.trainer.spec.moe_layers:
                known = [
                    (r.routed_experts, h.routes) for r, h in zip(self.rollouts, halves, strict=True)
                ]
                overlaps = [ev.overlap(served, own) for served, own in known if served is not None]
                self.found.add(f"trial.{trial.name}", overlap=float(np.mean(overlaps)))
            before = best.get(trial.rung)
            if before is None or self.distance(halves) < self.distance(before[1]):
                best[trial.rung] = (
                    f"{trial.name} = {value:g}"
                    if trial.is_smooth or trial.rung != GATES
                    else trial.name,
                    halves,
                )
        for rung, (what, halves) in best.items():
            self.rung(rung, what, halves)

    def run_trial(self, trial: Trial, *, replay: bool) -> tuple[float, list[Half]] | None:
        """(best value, the trainer's half with it)."""
        tried = {value: self.trainer.forward(self.rollouts, replay=replay, edit=trial.edit(value))
                 for value in trial.values(self.trainer.spec)}  # fmt: skip
        if not tried:
            return None
        for _ in range(SEARCHES if trial.is_smooth else 0):
            values = sorted(tried)
            place = values.index(min(tried, key=lambda value: self.distance(tried[value])))
            near = [
                (abs(values[at] - values[place]), values[at])
                for at in (place - 1, place + 1)
                if 0 <= at < len(values)
            ]
            between = (max(near)[1] * values[place]) ** 0.5
            tried[between] = self.trainer.forward(
                self.rollouts, replay=replay, edit=trial.edit(between)
            )
        best = min(tried, key=lambda value: self.distance(tried[value]))
        return best, tried[best]

    def other_trainers(self) -> None:
        """The trainer in the server's precision, with its config.json, with its checkpoint."""
        trainer, facts = self.trainer, None if self.server is None else self.server.facts
        cfg, parallel = trainer.cfg, trainer.parallel
        if self.found.number("dtype.differ") and self.server_dtype != "float16":
            with another_trainer(cfg, parallel, dtype=self.server_dtype) as other:
                halves = other.forward(self.rollouts, replay=self.has_routes)
            self.rung(
                "same precision",
                f"the trainer in {self.server_dtype}, with the server's routes",
                halves,
            )
            self.measure("same_precision", halves)
        if facts is None:
            return
        if self.found.number("config.differ"):
            with tempfile.TemporaryDirectory(prefix="explain_mismatch_") as folder:
                path = linked_checkpoint(Path(folder) / "model", cfg.model.path, facts.config)
                with another_trainer(cfg, parallel, path=path) as other:
                    halves = other.forward(self.rollouts, replay=False)
            self.rung(
                "same config.json", "the trainer's tensors with the server's config.json", halves
            )
            self.measure("their_config", halves)
        if self.found.number("weights.is_loaded") and facts.weights_path is not None:
            what, source = (
                f"the trainer with the server's checkpoint {facts.weights_path}",
                facts.weights_path,
            )
        elif self.replaced:
            what, source = "the trainer with its tensors changed as the server's are", None
        else:
            return
        with tempfile.TemporaryDirectory(prefix="explain_mismatch_") as folder:
            path = Path(folder) / "model"
            if source is None:
                weights.changed_checkpoint(path, cfg.model.path, self.replaced)
            else:
                linked_checkpoint(path, source, load_hf_config(cfg.model.path))
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
        return Rung(
            name,
            what,
            value,
            ev.difference(self.mu, pi),
            1 - value / first if first > LEAST_KL else 0.0,
        )

    def measure(self, name: str, halves: Sequence[Half]) -> None:
        self.found.add("kl", **{name: ev.kl(self.mu, logprobs(halves))})
        self.found.add("diff", **{name: ev.difference(self.mu, logprobs(halves))})

    def distance(self, halves: Sequence[Half]) -> float:
        return ev.difference(self.mu, logprobs(halves))


def logprobs(halves: Sequence[Half]) -> list[np.ndarray]:
    return [half.logprobs for half in halves]


def shifted_back(served: np.ndarray, rows: int, layers: int) -> np.ndarray:
    """Undo a shift of rows (the row at the end is repeated) and of layers."""
    places = np.clip(np.arange(len(served)) + rows, 0, len(served) - 1)
    return np.roll(served[places], -layers, axis=1)
