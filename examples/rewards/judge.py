"""A language model as the judge, over HTTP: [reward] function = "examples.rewards.judge:judge",
timeout_seconds = 60.

    pip install openai
    export JUDGE_URL=http://127.0.0.1:40000/v1 JUDGE_MODEL=Qwen/Qwen3-32B

reward.concurrency calls run at a time in each of reward.num_workers processes.  An answer without a
grade is an error, which is counted and gets reward.on_error: never silently 0.  Not run.
"""

import functools
import os
import re

from megatron_rl.reward import Episode, Score

QUESTION = """Grade the answer to a question.

Question: {prompt}
Reference answer: {label}
Answer: {response}
{rubric}
Reply with the grade alone, a number from 0 (wrong) to 10 (right and clear)."""
MAX_CHARACTERS = 20_000  # of the answer's end


async def judge(episode: Episode) -> Score:
    """The grade / 10, and logs reward/turns.

    Reads the column "rubric" of the data, where it has one.
    """
    question = QUESTION.format(
        prompt=episode.prompt,
        label=episode.label,
        response=episode.response[-MAX_CHARACTERS:],
        rubric=episode.metadata.get("rubric", ""),
    )
    reply = await client().chat.completions.create(
        model=os.environ["JUDGE_MODEL"],
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=8,
    )
    text = (reply.choices[0].message.content or "").strip()
    if not re.fullmatch(r"10|[0-9]", text):
        raise ValueError(f"the judge answered {text!r}, not a grade from 0 to 10")
    return Score(int(text) / 10, {"turns": float(len(episode.turns))})


@functools.cache
def client():
    """One per worker process, in whose event loop all calls run."""
    from openai import AsyncOpenAI  # here: only the workers need it

    return AsyncOpenAI(
        base_url=os.environ["JUDGE_URL"], api_key=os.environ.get("JUDGE_KEY", "none"), max_retries=2
    )
