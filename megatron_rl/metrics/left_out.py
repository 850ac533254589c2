"""Everything that a run leaves out, replaces or repeats, as one table (LEFT_OUT): its name, how it
is counted, how bad it is.

The step line, the summary, the health and the report show what the table says.  A checkpoint keeps
the totals that, by the table, count since the start of the run.  A test compares the table with
every *_total that the program emits.  This module imports no torch, because the viewer uses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from megatron_rl.metrics.evaluation_names import is_of_users

Level = Literal["base", "same", "normal", "watch", "bad"]
"""base: a number that others are a share of, not shown; same: counts the events of other entries
from another side; normal: follows from a setting or from what the model writes; watch: needs a
look; bad: wrong."""

Per = Literal["run", "step", "steps"]
"""The scope of a value.  run: everything since the first start of the run; step: its step alone;
steps: the value is a share or a flag, and the steps in which it is above 0 are counted."""


@dataclass(frozen=True)
class LeftOut:
    """An entry of the table: one metric, how it is counted and what is said about it."""

    metric: str
    """The name of the metric, or a pattern in which NAME stands for any name, also in the label."""
    label: str
    level: Level
    guide: str
    """A page of the repository with its anchor."""
    text: str = ""
    """The meaning of the metric, a sentence."""
    advice: str = ""
    per: Per = "run"
    of: str = ""
    """The metric that the count is a share of; empty: the share is one of the steps."""
    bad_above: float | None = None
    """The share of `of`, over the last steps, above which the count is bad."""
    line: str = ""
    """A template that the step line shows instead of label and count; `percent` is 100 x value."""

    @property
    def is_alarm(self) -> bool:
        return self.level in ("watch", "bad")

    @property
    def remark(self) -> str:
        return {"normal": " (normal)", "same": " (counted above)"}.get(self.level, "")

    def added(self, values: np.ndarray, first_step: int) -> np.ndarray:
        """Return float64 [n], what was counted in each of n successive steps.

        values: the metric in these steps, [n]; NaN where a step does not report it.
        first_step: the number of the step of values[0], from 1.
        """
        if self.per == "steps":
            return (values > 0).astype(float)
        if self.per == "step":
            return np.nan_to_num(values)
        # a step that does not report the total keeps the last reported one
        places = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
        totals = np.where(places < 0, 0.0, values[places])
        # a run that continues the checkpoint of another run begins with the totals of that run
        before = totals[:1] if first_step > 1 else np.zeros(len(totals[:1]))
        # a total that falls, as after a resume from an earlier checkpoint, counts nothing
        return np.maximum(np.diff(totals, prepend=before), 0.0)


REWARD = "docs/guides/data_and_reward.md#what-a-failed-response-gets"
DATA = "docs/guides/data_and_reward.md#broken-rows"
SHAPING = "docs/guides/data_and_reward.md#shaping"
FAULTS = "docs/design/architecture.md#what-the-client-does"
OVER_SAMPLING = "docs/design/architecture.md#over-sampling"
LENGTHS = "docs/guides/sampling.md#what-favours-short-responses"
BUDGET = "docs/guides/sampling.md#the-budget"
PARTIAL = "docs/guides/sampling.md#partial-rollouts"
RETRACTIONS = "docs/guides/sampling.md#retractions"
EPISODES = "docs/guides/agents.md#what-fails"
RESUMED = "docs/guides/agents.md#episodes-that-are-interrupted"
ANY_AGENT = "docs/guides/agents.md#any-agent"
TOOLS = "docs/guides/agents.md#messages-and-tools"
KNOWN = "docs/guides/agents.md#routes-that-are-known-are-not-sent-again"
TEACHERS = "docs/guides/distillation.md#what-can-go-wrong"
SERVER_DIES = "docs/guides/servers.md#a-server-dies"
ROUTES = "docs/concepts/routing_replay.md#tokens-without-a-route"
CLIPPING = "docs/guides/trouble.md#clipping-truncation-sample-size"
BATCH = "docs/guides/trouble.md#the-batch"
FIRST = "docs/guides/trouble.md#read-these-first"
FILES = "docs/reference/token_data.md#size-and-cost"


def reward_failure(metric: str, label: str, text: str, advice: str, guide: str = REWARD) -> LeftOut:
    return LeftOut(
        metric, label, "watch", guide, f"{text}: these responses got reward.on_error.", advice,
        of="reward/responses_total", bad_above=0.01,
    )  # fmt: skip


def teacher_fault(
    metric: str, label: str, text: str, advice: str, level: Level = "watch"
) -> LeftOut:
    return LeftOut(
        metric, label, level, TEACHERS, f"{text}; the sequences were sent again.", advice,
        of="teacher/requests_total",
    )  # fmt: skip


def fault(metric: str, label: str, text: str, advice: str, level: Level = "watch") -> LeftOut:
    return LeftOut(metric, label, level, FAULTS, text, advice)


LEFT_OUT = (
    # steps
    LeftOut(
        "optim/skipped_updates", "steps with skipped updates", "bad", FIRST,
        "The gradient was not finite: optimizer and weights did not change.",
        "Find the first step that has them, and compute its batch again (megatron-rl"
        " replay-batch).",
        per="steps", line="UPDATE SKIPPED",
    ),
    LeftOut(
        "train/nonfinite_frac", "steps with non-finite log-probs", "bad", CLIPPING,
        "Tokens with a NaN or infinite log-prob were left out of the loss.",
        "Find the first step that has them: a server that returns -inf, or an overflow in the"
        " model.",
        per="steps", line="NONFINITE {percent:.2g}%",
    ),
    LeftOut(
        "rollout/zero_advantages", "steps that taught nothing", "watch", BATCH,
        "Every advantage was 0: in each group all rewards were equal.",
        "The data is too easy or too hard, or the reward function gives everything the same: read"
        " responses and rewards of such a step; other prompts, or batch.dynamic_sampling.",
        per="steps", bad_above=0.5, line="no group taught anything",
    ),
    LeftOut(
        "rollout/zero_rewards", "steps with all rewards 0", "watch", BATCH,
        "Every response of the step got 0, and nothing else taught it anything.",
        "Read responses and rewards of such a step: the reward function may not recognise a right"
        " answer, or the task may be too hard for this model.",
        per="steps", bad_above=0.5, line="all rewards 0",
    ),
    LeftOut("optim/empty_updates", "steps with empty updates", "normal", BATCH, per="steps"),
    LeftOut(
        "train/rejected_frac", "steps with rejected responses", "normal", CLIPPING, per="steps"
    ),
    LeftOut("train/masked_frac", "steps with masked tokens", "normal", CLIPPING, per="steps"),
    LeftOut(
        "rollout/discarded_groups_frac", "steps with discarded groups", "normal", BATCH, per="steps"
    ),
    LeftOut(
        "eval/NAME/failed_frac", "evaluations of NAME with failed rewards", "watch", REWARD,
        "Responses of the evaluation could not be scored.", "Read the first warnings in the log.",
        per="steps",
    ),
    # rewards
    LeftOut("reward/responses_total", "responses to score", "base", REWARD),
    reward_failure(
        "reward/errors_total", "reward errors", "The reward function raised",
        'Read the first warnings in the log, which name its line; reward.on_error = "raise" stops'
        " at the first.",
    ),
    reward_failure(
        "reward/timeouts_total", "reward time-outs",
        "The reward function did not answer within reward.timeout_seconds",
        "Raise reward.timeout_seconds or reward.num_workers; the log has the responses that took"
        " too long.",
    ),
    reward_failure(
        "reward/crashes_total", "reward crashes", "The process of the reward function died",
        "Call the function by hand on a response of the log.",
    ),
    reward_failure(
        "reward/memory_total", "rewards out of memory",
        "The reward function ran out of its worker's memory",
        "Call the function by hand on a response of the log.",
    ),
    reward_failure(
        "reward/bad_labels_total", "unreadable labels", "The reward function cannot read the label",
        "Look at the data file: the log has the labels.", DATA,
    ),
    reward_failure(
        "reward/invalid_total", "invalid rewards",
        "The reward function returned no finite number, or a metric that is none",
        "Read the first warnings in the log, which have the value.",
    ),
    LeftOut(
        "reward/lost_starts_total", "lost reward workers", "watch", REWARD,
        "A worker was lost while it loaded the reward function.", "The log has how it ended.",
    ),
    LeftOut("reward/unformatted_total", "unformatted responses", "normal", SHAPING),
    # routes
    LeftOut(
        "replay/missing_rows_total", "missing routes", "watch", ROUTES,
        "Tokens for which the server sent no experts cannot be replayed.",
        "Look at the servers' faults and at replay.on_missing_route.", per="step",
    ),
    LeftOut(
        "replay/masked_tokens_total", "unrouted tokens masked", "watch", ROUTES,
        "Tokens left the loss since the row that predicts them has no route.",
        "Look at the servers' faults and at replay.on_missing_route.", per="step",
    ),
    LeftOut(
        "replay/dropped_samples_total", "unrouted samples dropped", "watch", ROUTES,
        "Samples with a missing route were dropped and sampled again.",
        "Look at the servers' faults and at replay.on_missing_route.", per="step",
    ),
    # servers and their faults
    LeftOut(
        "rollout/server_restarts_total", "server restarts", "watch", SERVER_DIES,
        "Servers of this run died and were replaced.",
        "Read the log of the server in the run's folder.",
    ),
    LeftOut(
        "rollout/circuits_opened_total", "servers left alone", "watch", FAULTS,
        "A server failed three requests in a row and got none for a while.",
        "The log names the server: read its log.",
    ),
    fault(
        "rollout/faults_timeout_total", "requests timed out",
        "Requests passed their connect, idle or total deadline; what they lack was requested"
        " again.",
        "Look for a server that hangs; else raise rollout.request_timeout_seconds.",
    ),
    fault(
        "rollout/faults_connection_total", "requests cut",
        "Requests were refused, reset or cut, and sent again.",
        "Read the servers' logs: one that died or is restarted, or a network that drops"
        " connections.",
    ),
    fault(
        "rollout/faults_http_total", "requests refused",
        "Servers answered 5xx, 408, 425 or 429; the requests were sent again.",
        "Read the servers' logs.",
    ),
    fault(
        "rollout/faults_body_total", "broken answers",
        "Servers answered without the samples that were requested, which were requested again.",
        "Look for a proxy between run and servers; read the servers' logs.",
    ),
    fault(
        "rollout/faults_aborted_total", "samples aborted",
        "A server cut samples short that this run did not abort; they were sampled again.",
        "Look for another client of these servers, or for a pause.",
    ),
    fault(
        "rollout/faults_stale_total", "samples of other weights",
        "Samples with tokens of other weights than the newest sent were dropped and sampled again.",
        "Look for another run that sends weights to these servers.",
    ),
    fault(
        "rollout/faults_routes_total", "samples with bad routes",
        "Samples without routed experts, or with malformed ones, were dropped and sampled again.",
        "Read the warnings in the log; check the servers' settings.",
    ),
    fault(
        "rollout/faults_sample_total", "malformed samples",
        "Samples with another id, or malformed tokens or log-probs, were dropped and sampled"
        " again.",
        "Read the warnings in the log: the servers' version, or a router between run and servers.",
        "bad",
    ),
    LeftOut(
        "rollout/lost_samples_total", "samples lost", "watch", PARTIAL,
        "A server did not return aborted responses in time: what was sampled of them is sampled"
        " again.",
        "Look for a server that hangs: its log.",
    ),
    LeftOut(
        "rollout/stale_samples_total", "samples too old", "watch", BUDGET,
        "Responses were dropped for their age and sampled again; the second time they may be"
        " shorter.",
        "Raise rollout.max_staleness, or lower rollout.over_sample.",
    ),
    LeftOut("rollout/stale_tokens_total", "tokens too old", "same", BUDGET),
    LeftOut("rollout/retries_total", "requests sent again", "same", FAULTS),
    LeftOut("rollout/failed_requests_total", "failed requests", "same", FAULTS),
    LeftOut("rollout/dropped_samples_total", "dropped samples", "same", FAULTS),
    LeftOut("rollout/dropped_tokens_total", "dropped tokens", "same", FAULTS),
    LeftOut("rollout/redrawn_samples_total", "responses sampled again", "same", LENGTHS),
    LeftOut("rollout/retracted_samples_total", "retracted samples", "normal", RETRACTIONS),
    LeftOut("rollout/retracted_tokens_total", "retracted tokens", "normal", RETRACTIONS),
    LeftOut("rollout/resent_routes_total", "answers with known routes", "normal", KNOWN),
    # teachers
    LeftOut("teacher/requests_total", "requests to teachers", "base", TEACHERS),
    LeftOut("teacher/retries_total", "requests to teachers sent again", "same", TEACHERS),
    LeftOut(
        "teacher/circuits_opened_total", "teachers left alone", "watch", TEACHERS,
        "A teacher's server failed three requests in a row and got none for a while.",
        "The log names the server: read its log.",
    ),
    teacher_fault(
        "teacher/faults_timeout_total", "teachers timed out",
        "Requests to teachers passed their deadline",
        "Look for a server that hangs; else raise rollout.request_timeout_seconds.",
    ),
    teacher_fault(
        "teacher/faults_connection_total", "teachers cut",
        "Requests to teachers were refused, reset or cut",
        "Read the servers' logs.",
    ),
    teacher_fault(
        "teacher/faults_http_total", "teachers refused", "Teachers answered 5xx, 408, 425 or 429",
        "Read the servers' logs.",
    ),
    teacher_fault(
        "teacher/faults_body_total", "broken answers of teachers",
        "Teachers answered without log-probs",
        "Look for a proxy between run and servers; read the servers' logs.",
    ),
    teacher_fault(
        "teacher/faults_count_total", "truncated answers of teachers",
        "Teachers answered with the log-probs of fewer or more tokens", "Read the servers' logs.",
        "bad",
    ),
    teacher_fault(
        "teacher/faults_text_total", "other texts of teachers",
        "Teachers answered with the log-probs of another text",
        "Look for something between run and servers that answers from a cache.", "bad",
    ),
    teacher_fault(
        "teacher/faults_value_total", "broken log-probs of teachers",
        "Teachers answered with NaN or a positive number",
        "A teacher's weights or its precision: its log.", "bad",
    ),
    # over-sampling and partial rollouts
    LeftOut("rollout/cancelled_groups_total", "cancelled groups", "normal", OVER_SAMPLING),
    LeftOut("rollout/cancelled_samples_total", "cancelled samples", "normal", OVER_SAMPLING),
    LeftOut("rollout/cancelled_tokens_total", "cancelled tokens", "normal", OVER_SAMPLING),
    LeftOut("rollout/cut_samples_total", "samples cut", "normal", PARTIAL),
    LeftOut("rollout/resumed_samples_total", "samples resumed", "normal", PARTIAL),
    # episodes
    LeftOut(
        "rollout/failed_episodes_total", "failed episodes", "watch", EPISODES,
        "The rollout function or environment raised, hung or returned no episode.",
        "Read the warnings in the log, which have the error.",
    ),
    LeftOut(
        "rollout/dropped_episodes_total", "dropped episodes", "watch", EPISODES,
        'Failed episodes were left out of their group (agent.on_error = "drop").',
        "Read the warnings in the log, which have the error.",
    ),
    LeftOut("rollout/resumed_episodes_total", "resumed episodes", "normal", RESUMED),
    LeftOut(
        "rollout/diverged_episodes_total", "diverged episodes", "watch", RESUMED,
        "Resumed episodes asked for other turns than the recorded ones, which were dropped.",
        'Make observations a function of the turns, or set agent.resume = "restart".',
    ),
    LeftOut("rollout/diverged_tokens_total", "diverged tokens", "same", RESUMED),
    LeftOut(
        "rollout/unread_turns_total", "unread answers", "watch", ANY_AGENT,
        "Answers whose request failed, or whose client hung up before, are not learned from.",
        "Raise the client's time-out, or ask for fewer tokens.",
    ),
    LeftOut("rollout/unread_tokens_total", "unread tokens", "same", ANY_AGENT),
    LeftOut("rollout/after_stop_tokens_total", "tokens after stops", "normal", ANY_AGENT),
    LeftOut("rollout/tool_calls_total", "tool calls", "normal", TOOLS),
    LeftOut("rollout/tool_errors_total", "tool errors", "normal", TOOLS),
    LeftOut("rollout/missing_tool_calls_total", "missing tool calls", "normal", ANY_AGENT),
    # what the run writes
    LeftOut(
        "run/unwritten_files_total", "unwritten files", "bad", FILES,
        "Files of the run's rollouts or token data could not be written.",
        "The log names the first: free space in run.dir.",
    ),
    LeftOut(
        "run/unsaved_batches_total", "unsaved mini-batches", "watch",
        "docs/guides/mismatch.md#what-a-bundle-holds",
        "Mini-batches that should have been saved could not be written.", "Free space in run.dir.",
    ),
    LeftOut(
        "track/NAME_failures_total", "failures of NAME", "watch",
        "docs/guides/look_at_a_run.md#a-tracker-that-fails",
        "The tracker failed or did not keep up: it lacks values, metrics.jsonl has all.",
        "The log has the first failure.",
    ),
)  # fmt: skip
ENTRIES = {entry.metric: entry for entry in LEFT_OUT}


@cache
def entry_of(metric: str) -> LeftOut | None:
    """Return the entry of a metric, with its name in place of NAME; None where the table has none,
    and for the metrics of users' functions, which may have any name.
    """
    if metric in ENTRIES or is_of_users(metric):
        return ENTRIES.get(metric)
    for pattern, entry in ENTRIES.items():
        named = re.escape(pattern).replace("NAME", "(.+)")
        if "NAME" in pattern and (match := re.fullmatch(named, metric)):
            return replace(entry, metric=metric, label=entry.label.replace("NAME", match[1]))
    return None
