"""Writes data/SET.jsonl with rows {"id", "prompt", "label"}, for the sets of SOURCES.

    python prepare.py                                   # downloads; needs: pip install datasets
    python prepare.py --from train=FILE aime25=FILE     # local files, jsonl or parquet

Other problems of your own: change SOURCES and the functions that convert.
"""

from megatron_rl.recipes.prepare import Row, Source, main

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def from_dapo(row: Row) -> Row:
    """The problem without DAPO's own instruction: data.template has another."""
    text = row["prompt"][-1]["content"].removeprefix(BEFORE).removesuffix(AFTER)
    return {"prompt": text, "label": row["reward_model"]["ground_truth"]}


def from_problem(row: Row) -> Row:
    return {"prompt": row["problem"], "label": row["answer"]}


def solution(row: Row) -> str:
    """A response that reward.py must accept: the first rows are checked with it."""
    return f"The answer is \\boxed{{{row['label']}}}."


def problems(repository: str, num_rows: int, file: str = "data/train-00000-of-00001.parquet"):
    return Source(repository, file, {"problem": str, "answer": object}, from_problem, num_rows)


SOURCES = {  # name of the set -> where it is on the Hugging Face hub
    # 1.79 million rows, most of them repeated: about 17,000 problems remain
    "train": Source(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "data/dapo-math-17k.parquet",
        {"prompt": list, "reward_model": dict},
        from_dapo,
    ),
    "aime25": problems("MathArena/aime_2025", 30),
    "math500": problems("HuggingFaceH4/MATH-500", 500, "test.jsonl"),
}

if __name__ == "__main__":
    raise SystemExit(main(SOURCES, solution))
