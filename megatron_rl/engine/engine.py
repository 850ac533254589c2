"""The training engine: one model on this rank's share of the job.  old_logprobs, update, export,
checkpoint state.

Shapes: T packed rows of a micro-batch (this rank's, under context parallelism), L MoE layers, K
top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import __version__ as core_version
from torch import Tensor

from megatron_rl.batch.pack import PackRule
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.engine.forward import RolloutRoutes, run_schedule, to_device
from megatron_rl.engine.fused_logprobs import defer_lm_head, fused_kept_logprobs, lm_head_weight
from megatron_rl.engine.logprobs import TokenLogprobs, kept_token_logprobs
from megatron_rl.engine.mini_batch_inputs import make_sequences, selected_tokens
from megatron_rl.engine.model import moe_routers
from megatron_rl.engine.offload import Offload
from megatron_rl.engine.optim import Optimizer, StepOutcome, wrap_ddp
from megatron_rl.engine.provider import make_provider
from megatron_rl.engine.reference import Reference
from megatron_rl.engine.routers import check_router_shift, check_routers
from megatron_rl.engine.statistics import (
    PassTokens,
    add_old_pass,
    add_update,
    add_update_pass,
    pass_tokens,
)
from megatron_rl.loss import LossInputs, policy_loss, token_shares
from megatron_rl.loss.custom import check_loss
from megatron_rl.loss.policy import PolicyLoss
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.models.cost import balance_length
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import MiniBatch, PackedBatch
from megatron_rl.replay.compatibility import check_compatibility
from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.manager import ReplayManager, ReplayPass, Routes, WatchRouters
from megatron_rl.replay.mismatch import Mismatch, MismatchReport, flips_per_token, reduce_mismatch
from megatron_rl.replay.router_shift import RouterRecord, RouterShift, shift_per_token
from megatron_rl.weights.hf.export import HFStream, on_rank_0

ReplayMode = Literal["none", "R2", "R3"]


@dataclass(frozen=True)
class UpdateTokens:
    """What the loss of one micro-batch was computed from: this rank's rows, without gradient, on
    the last stage.
    """

    index: int  # of the micro-batch
    micro_batch: PackedBatch
    logprobs: Tensor  # float32 [T] log pi
    old_logprobs: Tensor  # float32 [T] log pi_old
    entropy: Tensor  # float32 [T]
    loss: PolicyLoss
    shares: Tensor  # [T] what every token adds to the mini-batch loss


ObserveTokens = Callable[[UpdateTokens], None]


@dataclass(frozen=True)
class OldPass:
    """Results of the old-logprob pass for the update of the same mini-batch, per micro-batch; they
    stay on the rank.
    """

    logprobs: tuple[Tensor, ...]  # float32 [T], on the last pipeline stage (empty elsewhere)
    recorded: tuple[Tensor, ...] | None  # ids [l, t, K] (R2 only)
    mismatch: Mismatch | None
    flips: (
        tuple[Tensor, ...] | None
    )  # uint8 [T] MoE layers where a token's experts are not the rollout's; None: not measured
    reference: tuple[Tensor, ...] | None = None
    """As logprobs, of the reference policy; None without loss.kl_coef."""
    router: RouterRecord | None = (
        None  # the router's probabilities of the experts it used; None without loss.router_shift
    )


class Engine:
    """Build with `Engine(cfg, parallel, total_updates)`: loads the HF checkpoint of `model.path`
    into this rank's shards.

    spec: replaces the one of the checkpoint's config.json (another kind of router, same tensors).
    """

    def __init__(
        self, cfg: Config, parallel: Parallel, *, total_updates: int, spec: ModelSpec | None = None
    ) -> None:
        check_loss(cfg.loss)
        self.cfg = cfg
        self.parallel = parallel
        self.provider = make_provider(cfg.model, cfg.parallel, parallel, cfg.megatron.fields, spec)
        self.spec, self.core_config = self.provider.spec, self.provider.core_config
        check_compatibility(
            self.core_config,
            mode=cfg.replay.mode,
            measure=cfg.replay.measure,
            core_version=core_version,
        )
        self.chunks = self.provider.build()
        check_routers(self.chunks, self.spec.moe_layers)
        check_router_shift(cfg.loss, self.spec)
        self.provider.load(self.chunks)
        routers = [
            (self.spec.moe_layers.index(layer), router)
            for layer, router in moe_routers(self.chunks)
        ]
        router = self.spec.router
        self.manager = ReplayManager(
            routers,
            num_experts=self.spec.num_experts,
            scores_are_logits=router.score_function == "softmax" and not router.pre_softmax,
        )
        self.layout = RankLayout(
            layers=self.manager.layers,
            tp_rank=parallel.tp_rank,
            tp_size=parallel.tp_size,
            sequence_parallel=self.core_config.sequence_parallel,
            num_experts=self.spec.num_experts,
            top_k=self.spec.top_k,
            ep_size=parallel.ep_size,
            cp_rank=parallel.cp_rank,
            cp_size=parallel.cp_size,
            padded=cfg.model.batch_format == "bshd",
        )
        self.pack_rule = PackRule(
            self.layout.pad_multiple,
            equal_sizes=cfg.model.token_dispatcher == "allgather",
            sequence_multiple=self.layout.sequence_multiple,
            count_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
            padded=self.layout.padded,
            mask_missing_routes=cfg.replay.on_missing_route == "mask_token",
            balance_length=balance_length(self.spec),
        )
        self._rollout_routes = RolloutRoutes(
            self.layout, len(self.spec.moe_layers), parallel.device
        )
        # before anything changes the weights
        self._reference = Reference(self.chunks) if cfg.loss.kl_coef else None
        if cfg.model.fused_lm_head:
            defer_lm_head(self.chunks[-1])
        self.models = wrap_ddp(self.chunks, self.core_config, cfg)
        self.optimizer = Optimizer(self.models, cfg, total_updates=total_updates)
        self.offload = Offload(self.models, self.optimizer.core, parallel.device)

    def old_logprobs(self, batch: MiniBatch, sums: MetricSums, *, replay: ReplayMode) -> OldPass:
        """log pi_old of every response token (forward only).  R3 replays the rollout's experts, R2
        records.

        Adds the training-inference discrepancy of this mini-batch to `sums`.  With loss.kl_coef
        also log pi_ref, of the weights as loaded, in a second pass with the routes of the update,
        so that the two differ by their weights only.
        """
        micro_batches = self._to_device(batch)
        routes = self._rollout_routes.of(
            batch, replay=replay == "R3", compare=self.cfg.replay.measure
        )
        router = self._router_record()
        logprobs, replayed = self._forward(
            micro_batches, routes, record=replay == "R2", watch=router
        )
        flips = None
        if replayed.mismatch is not None:
            bounds = [micro_batch.cu_seqlens for micro_batch in micro_batches]
            flips = flips_per_token(
                replayed.mismatch, self.layout, bounds, self.parallel.model_group
            )
        if self._contributes:
            tokens = self._pass_tokens(micro_batches, flips, batch)
            add_old_pass(sums, tokens, torch.cat(logprobs))
        reference = None
        if self._reference is not None:
            with self._reference.in_place():
                routes = self._update_routes(batch, replayed.recorded, replay)
                reference, _ = self._forward(micro_batches, routes)
        return OldPass(logprobs, replayed.recorded, replayed.mismatch, flips, reference, router)

    def update(
        self, batch: MiniBatch, old: OldPass, sums: MetricSums, *, replay: ReplayMode
    ) -> None:
        """One optimizer step on one mini-batch."""
        self.apply_gradient(self.compute_gradient(batch, old, sums, replay=replay), batch, sums)

    def compute_gradient(
        self,
        batch: MiniBatch,
        old: OldPass,
        sums: MetricSums,
        *,
        replay: ReplayMode,
        observe: ObserveTokens | None = None,
    ) -> float:
        """Forward and backward of one mini-batch (loss.name), with the routes that `replay` names;
        the gradient's global norm.

        observe: called with what every micro-batch's loss was computed from, on the ranks of the
        last stage.
        """
        micro_batches = self._to_device(batch)
        routes = self._update_routes(batch, old.recorded, replay)
        further = self._further_inputs(batch, micro_batches, routes, old)
        seen: list[Tensor] = []

        def loss_of(index: int, micro_batch: PackedBatch, output: Tensor) -> Tensor:
            found = self._token_logprobs(output, micro_batch)
            logprobs = found.logprobs
            inputs = LossInputs(
                logprobs,
                old.logprobs[index],
                micro_batch.rollout_logprobs,
                micro_batch.advantages,
                micro_batch.loss_mask,
                entropy=found.entropy,
                **further[index],
            )
            loss = policy_loss(inputs, self.cfg.loss)
            shares = token_shares(
                loss,
                further[index]["sequences"],
                self.cfg.loss,
                num_responses=batch.num_responses,
                num_response_tokens=batch.num_response_tokens,
            )
            total = self.cfg.loss.scale * shares.sum()
            if observe is not None:
                values = logprobs.detach(), old.logprobs[index], found.entropy.detach()
                observe(
                    UpdateTokens(
                        index, micro_batch, *values, loss, self.cfg.loss.scale * shares.detach()
                    )
                )
            if self._contributes:
                parts = len(batch.micro_batches) * self.parallel.dp_size * self.parallel.cp_size
                add_update(
                    sums, total, parts, loss, found, micro_batch, batch.policy_version, batch.index
                )
                seen.append(logprobs.detach())
            return total

        self._set_mode(training=True)
        self.optimizer.zero_grad()
        run_schedule(
            self.models,
            self.manager,
            micro_batches,
            routes,
            loss_of,
            training=True,
            padded=self.layout.padded,
        )
        if self._contributes:
            tokens = self._pass_tokens(micro_batches, old.flips, batch)
            add_update_pass(sums, tokens, torch.cat(seen), torch.cat(old.logprobs))
        return self.optimizer.prepare()

    def _further_inputs(
        self,
        batch: MiniBatch,
        micro_batches: Sequence[PackedBatch],
        routes: Sequence[Routes],
        old: OldPass,
    ) -> list[dict[str, Any]]:
        """Return, for every micro-batch, the fields of LossInputs that are computed for the
        complete mini-batch before its update.
        """
        router_shift = self._router_shift(micro_batches, routes, old.router)
        if not self.parallel.is_last_stage:  # where the loss is computed
            return []
        loss, parallel = self.cfg.loss, self.parallel
        columns: dict[str, Sequence[Any] | None] = {
            "reference_logprobs": old.reference,
            "router_shift": router_shift,
            "selected": selected_tokens(micro_batches, old.logprobs, loss, parallel),
            "sequences": make_sequences(batch, micro_batches, old.logprobs, loss, parallel),
        }
        count = range(len(micro_batches))
        return [
            {name: None if parts is None else parts[i] for name, parts in columns.items()}
            for i in count
        ]

    def _router_record(self) -> RouterRecord | None:
        if not self.cfg.loss.switches.router_shift:
            return None
        return RouterRecord(self.manager.scores_are_logits, self.manager.id_dtype)

    def _router_shift(
        self,
        micro_batches: Sequence[PackedBatch],
        routes: Sequence[Routes],
        old: RouterRecord | None,
    ) -> tuple[Tensor, ...] | None:
        """loss.router_shift: shift_t [T] of every micro-batch.  One more forward pass, with the
        weights and routes of the update: the last stage computes the loss of a micro-batch before
        other stages could send it their layers' part.
        """
        if old is None:
            return None
        shift = RouterShift(old)
        self._forward(micro_batches, routes, watch=shift)
        bounds = [micro_batch.cu_seqlens for micro_batch in micro_batches]
        return shift_per_token(
            shift,
            self.layout,
            bounds,
            self.parallel.model_group,
            num_layers=len(self.spec.moe_layers),
            device=self.parallel.device,
        )

    def _pass_tokens(
        self,
        micro_batches: Sequence[PackedBatch],
        flips: Sequence[torch.Tensor] | None,
        batch: MiniBatch,
    ) -> PassTokens:
        return pass_tokens(
            micro_batches,
            flips,
            mini_batch=batch.index,
            cp_group=self.parallel.cp_group,
            policy_version=batch.policy_version,
        )

    def apply_gradient(self, grad_norm: float, batch: MiniBatch, sums: MetricSums) -> StepOutcome:
        """Change the weights by the gradient of `batch`, whose norm is `grad_norm`, unless it is
        not finite or 0.
        """
        outcome = self.optimizer.apply(grad_norm)
        # every rank has the same numbers, and the sums are added over ranks
        if self.parallel.rank == 0:
            sums.add("optim/grad_norm", outcome.grad_norm)
            sums.add("optim/lr", outcome.lr)
            sums.add("optim/skipped_updates", float(outcome.skipped))
            sums.add("optim/empty_updates", float(outcome.empty))
            sums.add("perf/balance", batch.lockstep_efficiency)
        return outcome

    def mismatch(self, passes: Sequence[OldPass]) -> MismatchReport | None:
        """Expert mismatch of a step's old-logprob passes, reduced over the job.  Collective."""
        return reduce_mismatch(
            [item.mismatch for item in passes if item.mismatch is not None],
            layers=self.manager.layers,
            num_layers=len(self.spec.moe_layers),
            top_k=self.spec.top_k,
            pp_group=self.parallel.pp_group,
            device=self.parallel.device,
        )

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        """(HF name, full tensor; None off rank 0) of every parameter.

        Collective: every rank must exhaust it.
        """
        return on_rank_0(self.export_parts(1), self.parallel.rank, self.parallel.device)

    def export_parts(self, max_sources: int) -> HFStream:
        """Every parameter as HF tensors, each on one of at most `max_sources` ranks.

        Collective, as export.
        """
        return self.provider.export(self.chunks, max_sources)

    @property
    def _contributes(self) -> bool:
        """Whether this rank's statistics count: tensor ranks hold the same values, context ranks
        their own tokens.
        """
        return self.parallel.is_last_stage and self.parallel.tp_rank == 0

    def _forward(
        self,
        micro_batches: Sequence[PackedBatch],
        routes: Sequence[Routes],
        *,
        record: bool = False,
        watch: WatchRouters | None = None,
    ) -> tuple[tuple[Tensor, ...], ReplayPass]:
        """Log-probs of every micro-batch without gradient (last stage; empty elsewhere), and the
        replay pass.
        """
        logprobs: list[Tensor] = []

        def keep(index: int, micro_batch: PackedBatch, output: Tensor) -> Tensor:
            values = self._token_logprobs(output, micro_batch).logprobs
            logprobs.append(values)
            return values.sum()

        self._set_mode(training=False)
        with torch.no_grad():
            replayed = run_schedule(
                self.models,
                self.manager,
                micro_batches,
                routes,
                keep,
                training=False,
                record=record,
                padded=self.layout.padded,
                watch=watch,
            )
        return tuple(logprobs), replayed

    def _update_routes(
        self, batch: MiniBatch, recorded: Sequence[Tensor] | None, replay: ReplayMode
    ) -> list[Routes]:
        """What the update replays.  Raises ValueError for R2 without a record."""
        if replay != "R2":  # the old-logprob pass has checked these routes
            return self._rollout_routes.of(batch, replay=replay == "R3", compare=False, check=False)
        if recorded is None:
            raise ValueError(
                "replay = R2: the old-logprob pass recorded nothing; run it with replay = R2 too"
            )
        return [Routes(replay=ids) for ids in recorded]

    def _to_device(self, batch: MiniBatch) -> list[PackedBatch]:
        return to_device(
            batch, self.layout, self.parallel.device, with_kept=self.parallel.is_last_stage
        )

    def _token_logprobs(self, output: Tensor, micro_batch: PackedBatch) -> TokenLogprobs:
        """Of what the last stage returned: logits, or hidden states (model.fused_lm_head)."""
        vocab_size, temperature = self.spec.vocab_size, self.cfg.rollout.temperature
        if not self.cfg.model.fused_lm_head:
            return kept_token_logprobs(
                output.flatten(0, 1),
                micro_batch.labels,
                micro_batch.kept,
                vocab_size=vocab_size,
                temperature=temperature,
                tp_group=self.parallel.tp_group,
                overwrite=True,  # nothing else reads the logits
            )
        return fused_kept_logprobs(
            output,
            lm_head_weight(self.chunks[-1]),
            micro_batch.labels,
            micro_batch.kept,
            vocab_size=vocab_size,
            temperature=temperature,
            tp_group=self.parallel.tp_group,
            sequence_parallel=self.core_config.sequence_parallel,
            # its hooks wait for weight.grad
            into_main_grad=not self.models[-1].ddp_config.overlap_grad_reduce,
        )

    def _set_mode(self, *, training: bool) -> None:
        assert not self.offload.freed, "the servers have the memory of this model"
        for model in self.models:
            model.train(training)
