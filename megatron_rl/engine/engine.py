"""The training engine: this rank's shards of the model, the two passes over it, and its export.

Shapes: T packed rows of a micro-batch (this rank's, under context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from megatron.core import __version__ as core_version
from torch import Tensor

from megatron_rl.batch.pack import PackRule
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.engine.forward import Pipeline, to_device
from megatron_rl.engine.fused_logprobs import HeadSettings, defer_lm_head
from megatron_rl.engine.lora import add_adapters, open_peft
from megatron_rl.engine.mini_batch_inputs import make_sequences, selected_tokens, with_teachers
from megatron_rl.engine.model import moe_routers
from megatron_rl.engine.offload import Offload
from megatron_rl.engine.optim import Optimizer, StepOutcome, wrap_ddp
from megatron_rl.engine.output_logprobs import FusedHead, OutputLogprobs
from megatron_rl.engine.pass_results import ObserveTokens, OldPass, ReplayMode
from megatron_rl.engine.provider import NativeProvider, make_provider
from megatron_rl.engine.reference import Reference
from megatron_rl.engine.routers import check_router_shift, check_routers
from megatron_rl.engine.statistics import (
    PassTokens,
    add_old_pass,
    add_update_pass,
    pass_tokens,
)
from megatron_rl.engine.update_loss import UpdateLoss
from megatron_rl.loss.custom import check_loss
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.models.cost import balance_length
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records.packed import MiniBatch, PackedBatch
from megatron_rl.replay.compatibility import check_compatibility
from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.manager import ReplayManager, ReplayPass, RouterHook, Routes
from megatron_rl.replay.mismatch import MismatchReport, flips_per_token, reduce_mismatch
from megatron_rl.replay.rollout_routes import RolloutRoutes
from megatron_rl.replay.router_shift import RouterRecord, RouterShift, shift_per_token
from megatron_rl.weights.hf.export import HFStream, on_rank_0


class Engine:
    """One model for training, loaded from the HF checkpoint in model.path.

    total_updates: optimizer steps of the run, for the learning-rate schedule.
    spec: replaces the sizes of the checkpoint's config.json (the same tensors, another router).
    """

    def __init__(
        self, cfg: Config, parallel: Parallel, *, total_updates: int, spec: ModelSpec | None = None
    ) -> None:
        check_loss(cfg.loss)  # before the checkpoint, whose loading takes minutes
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
        moe_layers = self.spec.moe_layers
        # before the weights are loaded, which takes minutes
        check_routers(self.chunks, moe_layers)
        check_router_shift(cfg.loss, self.spec)
        adapter = open_peft(cfg.lora, self.spec)
        self.provider.load(self.chunks)
        self.adapters = add_adapters(self.chunks, self.spec, parallel, cfg, adapter)
        # numbered on the axis of the model's MoE layers, as rollouts number them
        routers = [(moe_layers.index(layer), router) for layer, router in moe_routers(self.chunks)]
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
            # core's interleaved schedules take multiples of pp micro-batches
            count_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
            padded=self.layout.padded,
            mask_missing_routes=cfg.replay.on_missing_route == "mask_token",
            balance_length=balance_length(self.spec),
        )
        self._rollout_routes = RolloutRoutes(self.layout, len(moe_layers), parallel.device)
        self._prepare_training(total_updates)

    def _prepare_training(self, total_updates: int) -> None:
        """Wrap the model for gradients, and make what trains it."""
        cfg = self.cfg
        # before DDP: it replaces the output layer's forward, not its parameters
        if cfg.model.fused_lm_head:
            defer_lm_head(self.chunks[-1])
        # as Config.overlaps_grad_reduce, where provider and device are resolved
        overlap = self.parallel.device.type == "cuda" and isinstance(self.provider, NativeProvider)
        self.models = wrap_ddp(self.chunks, self.core_config, cfg, overlap=overlap)
        self._with_reference: Callable[[], AbstractContextManager[None]] | None = None
        if cfg.loss.kl_coef and cfg.lora.rank:
            self._with_reference = self.adapters.disabled
        elif cfg.loss.kl_coef:
            # a copy of the weights as loaded: take it before anything changes them
            self._with_reference = Reference(self.chunks, self.parallel.device).in_place
        self._pipeline = Pipeline(self.models, self.manager, padded=self.layout.padded)
        self.optimizer = Optimizer(self.models, cfg, total_updates=total_updates)
        kept = self.optimizer.cosine.last
        self.offload = Offload(self.models, self.optimizer.core, self.parallel.device, kept)

    @property
    def _token_logprobs(self) -> OutputLogprobs:
        """The function that computes log-probs, with the temperature that `cfg` has now."""
        vocab_size, temperature = self.spec.vocab_size, self.cfg.rollout.temperature
        group, fused = self.parallel.tp_group, None
        if self.cfg.model.fused_lm_head:
            head = HeadSettings(
                vocab_size=vocab_size,
                temperature=temperature,
                tp_group=group,
                sequence_parallel=self.core_config.sequence_parallel,
                # with adapters the base has no gradient, and W' is no parameter
                into_main_grad=not self.cfg.lora.rank,
                needs_grad=self.models[-1].ddp_config.overlap_grad_reduce,
            )
            fused = FusedHead(self.chunks[-1], head, self.adapters)
        return OutputLogprobs(vocab_size, temperature, group, fused)

    def old_logprobs(self, batch: MiniBatch, sums: MetricSums, *, replay: ReplayMode) -> OldPass:
        """Compute log pi_old of every response token, forward only.

        R3 replays the rollout's experts, R2 records the live ones.  Adds the training-inference
        discrepancy of this mini-batch to `sums`.  With loss.kl_coef a second pass computes
        log pi_ref with the weights as loaded; it uses the routes of the update, so that pi and
        pi_ref differ by their weights only.
        """
        micro_batches = self._to_device(batch)
        routes = self._rollout_routes.of(
            batch, replay=replay == "R3", compare=self.cfg.replay.measure
        )
        router = self._router_record()
        logprobs, replayed = self._forward(
            micro_batches, routes, record=replay == "R2", router_hook=router
        )
        flips = None
        if replayed.mismatch is not None:
            # a token's layers are on several stages: count its flips over the model group
            bounds = [micro_batch.cu_seqlens for micro_batch in micro_batches]
            flips = flips_per_token(
                replayed.mismatch, self.layout, bounds, self.parallel.model_group
            )
        if self._contributes:
            tokens = self._pass_tokens(micro_batches, flips, batch)
            add_old_pass(sums, tokens, torch.cat(logprobs))
        reference = None
        if self._with_reference is not None:
            with self._with_reference():
                routes = self._update_routes(batch, replayed.recorded, replay)
                reference, _ = self._forward(micro_batches, routes)
        return OldPass(logprobs, replayed.recorded, replayed.mismatch, flips, reference, router)

    def update(
        self, batch: MiniBatch, old: OldPass, sums: MetricSums, *, replay: ReplayMode
    ) -> None:
        """Make one optimizer step on one mini-batch."""
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
        """Run forward and backward of one mini-batch with the routes that `replay` names; return
        the gradient's global norm.

        observe: called on the ranks of the last stage with the tokens of every micro-batch.
        """
        micro_batches = with_teachers(self._to_device(batch), old.logprobs, self.cfg.loss)
        routes = self._update_routes(batch, old.recorded, replay)
        # the loss reads no samples, and so no expert ids
        parallel, plain = self.parallel, replace(batch, samples=())
        loss = UpdateLoss(
            config=self.cfg.loss,
            batch=plain,
            old=old,
            further=self._further_inputs(plain, micro_batches, routes, old),
            token_logprobs=self._token_logprobs,
            sums=sums if self._contributes else None,
            num_parts=len(batch.micro_batches) * parallel.dp_size * parallel.cp_size,
            observe=observe,
        )
        self._set_mode(training=True)
        self.optimizer.zero_grad()
        with self.manager.run_pass(routes, training=True):
            self._pipeline.run(micro_batches, loss, training=True)
        if self._contributes:
            tokens = self._pass_tokens(micro_batches, old.flips, batch)
            add_update_pass(sums, tokens, torch.cat(loss.seen), torch.cat(old.logprobs))
        return self.optimizer.prepare()

    def _further_inputs(
        self,
        batch: MiniBatch,
        micro_batches: Sequence[PackedBatch],
        routes: Sequence[Routes],
        old: OldPass,
    ) -> list[dict[str, Any]]:
        """Return, per micro-batch, the fields of LossInputs that need the complete mini-batch.

        It is empty off the last stage, which computes the loss.
        """
        # every stage runs this pass, also those without the loss
        router_shift = self._router_shift(micro_batches, routes, old.router)
        if not self.parallel.is_last_stage:
            return []
        loss, parallel = self.cfg.loss, self.parallel
        columns: dict[str, Sequence[Any] | None] = {
            "reference_logprobs": old.reference,
            "router_shift": router_shift,
            "selected": selected_tokens(micro_batches, old.logprobs, loss, parallel),
            "sequences": make_sequences(batch, micro_batches, old.logprobs, loss, parallel),
        }
        return [
            {name: None if parts is None else parts[i] for name, parts in columns.items()}
            for i in range(len(micro_batches))
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
        """Return shift_t [T] of every micro-batch for loss.router_shift; None without it.

        This takes one more forward pass with the weights and routes of the update: the last stage
        computes the loss of a micro-batch before the other stages could send their layers' part.
        """
        if old is None:
            return None
        shift = RouterShift(old)
        self._forward(micro_batches, routes, router_hook=shift)
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
        flips: Sequence[Tensor] | None,
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
        """Change the weights by the gradient of `batch`, whose norm is `grad_norm`.

        They do not change where the norm is not finite or 0.
        """
        outcome = self.optimizer.apply(grad_norm)
        # every rank has the same numbers, and sums are added over ranks: count them once
        if self.parallel.rank == 0:
            sums.add("optim/grad_norm", outcome.grad_norm)
            sums.add("optim/lr", outcome.lr)
            if outcome.cosine is not None:
                sums.add("optim/grad_cosine", outcome.cosine)
            sums.add("optim/skipped_updates", float(outcome.skipped))
            sums.add("optim/empty_updates", float(outcome.empty))
            sums.add("perf/balance", batch.lockstep_efficiency)
        return outcome

    def mismatch(self, passes: Sequence[OldPass]) -> MismatchReport | None:
        """Return the expert mismatch of a step's old-logprob passes over all ranks.  Collective."""
        return reduce_mismatch(
            [old.mismatch for old in passes if old.mismatch is not None],
            layers=self.manager.layers,
            num_layers=len(self.spec.moe_layers),
            top_k=self.spec.top_k,
            pp_group=self.parallel.pp_group,
            device=self.parallel.device,
        )

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (HF name, full tensor) of every parameter; the tensor is None off rank 0.

        Collective: every rank must exhaust it.
        """
        return on_rank_0(self.export_parts(1), self.parallel.rank, self.parallel.device)

    def export_parts(self, max_sources: int) -> HFStream:
        """Yield every HF tensor on one of at most `max_sources` ranks.  Collective, as export."""
        return self.provider.export(self.chunks, max_sources)

    @property
    def _contributes(self) -> bool:
        """True on the ranks whose statistics count: tensor ranks hold the same values, context
        ranks hold different tokens.
        """
        return self.parallel.is_last_stage and self.parallel.tp_rank == 0

    def _forward(
        self,
        micro_batches: Sequence[PackedBatch],
        routes: Sequence[Routes],
        *,
        record: bool = False,
        router_hook: RouterHook | None = None,
    ) -> tuple[tuple[Tensor, ...], ReplayPass]:
        """Return the log-probs of every micro-batch, without gradient, and the replay pass.

        The log-probs are empty off the last stage.
        """
        logprobs: list[Tensor] = []

        def keep(index: int, micro_batch: PackedBatch, output: Tensor) -> Tensor:
            values = self._token_logprobs(output, micro_batch).logprobs
            logprobs.append(values)
            return values.sum()  # the schedule needs a scalar; nothing reads it

        self._set_mode(training=False)
        passed = self.manager.run_pass(
            routes, training=False, record=record, router_hook=router_hook
        )
        with torch.no_grad(), passed as replayed:
            self._pipeline.run(micro_batches, keep, training=False)
        return tuple(logprobs), replayed

    def _update_routes(
        self, batch: MiniBatch, recorded: Sequence[Tensor] | None, replay: ReplayMode
    ) -> list[Routes]:
        """Return the routes of the update.  Raises ValueError for R2 without a record."""
        if replay != "R2":
            # check=False: the old-logprob pass has checked these routes
            return self._rollout_routes.of(batch, replay=replay == "R3", compare=False, check=False)
        if recorded is None:
            raise ValueError(
                "replay = R2: the old-logprob pass recorded no routes; run it with replay = R2 too"
            )
        return [Routes(replay=ids) for ids in recorded]

    def _to_device(self, batch: MiniBatch) -> list[PackedBatch]:
        return to_device(
            batch.micro_batches,
            self.layout,
            self.parallel.device,
            with_kept=self.parallel.is_last_stage,
        )

    def _set_mode(self, *, training: bool) -> None:
        assert not self.offload.freed, "the servers have the memory of this model: restore it first"
        for model in self.models:
            # core recomputes entire layers in training mode only
            model.train(training)
