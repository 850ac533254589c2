"""The records that travel between stages.  Read this folder second, after train.py.

    prompts        Prompt: the question that responses are sampled to
    rollouts       Rollout, EpisodeRecord, RolloutGroup: records that were sampled
    packed         Sample, PackedBatch, MiniBatch, StepResult: records that are trained on
    row_sets       sets of ids of a micro-batch's rows
    token_sets     a set of ids per sampled token: kept sets (rollout.top_p, top_k, min_p)
    teacher_scores the numbers of a teacher about sampled tokens

Every stage takes and returns records.  None is changed in place: `dataclasses.replace` makes a new
one.  Stages that read no expert ids (scoring, penalties, advantages, metrics, lines of files) get
groups `without_routes`; `with_routes` adds the ids again before the groups are trained on.

Names of `packed` and `row_sets` are imported from there: these files need torch, which processes of
environments and agents do not load.

Shapes: S tokens of one sequence (prompt + response), R sampled tokens, L MoE layers, K top-k,
G responses of a group, B sequences and T packed tokens of one micro-batch (pads included).
"""

from megatron_rl.records.files import Files
from megatron_rl.records.prompts import Prompt
from megatron_rl.records.rollouts import (
    DIGEST_BYTES,
    NO_EPISODE,
    EpisodeRecord,
    FinishReason,
    Rollout,
    RolloutGroup,
    check_digest,
    check_episode,
    episode_digest,
    routes_digest,
    spanned_versions,
    version_spans,
    with_routes,
    without_routes,
)

__all__ = [
    "DIGEST_BYTES", "NO_EPISODE", "EpisodeRecord", "Files", "FinishReason", "Prompt", "Rollout",
    "RolloutGroup", "check_digest", "check_episode", "episode_digest", "routes_digest",
    "spanned_versions", "version_spans", "with_routes", "without_routes",
]  # fmt: skip
