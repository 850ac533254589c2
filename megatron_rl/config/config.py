"""The complete configuration: all sections, checked by all rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import field_validator

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.rules.between_sections import section_problems
from megatron_rl.config.rules.no_effect import check_no_effect
from megatron_rl.config.rules.rollout_rules import check_rollout
from megatron_rl.config.rules.server_rules import check_can_release, check_options
from megatron_rl.config.sections import RolloutConfig


class Config(AllSections):
    """All sections of a configuration that has passed every rule."""

    @field_validator("rollout")
    @classmethod
    def check_section(cls, rollout: RolloutConfig) -> RolloutConfig:
        # as a validator of the field, it is reported together with errors of other sections
        check_rollout(rollout)
        return rollout

    def problems(self) -> Iterator[str]:
        check_no_effect(self)
        # device auto resolves to cpu only at start-up, which checks this again
        check_can_release(self, self.run.device)
        check_options(self.rollout, needs_routes=self.needs_routes)
        yield from section_problems(self)
