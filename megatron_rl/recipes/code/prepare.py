"""Writes data/train.jsonl and data/test.jsonl: {"id", "prompt", "label", "tests", "setup"}.

    python prepare.py                                # downloads; needs: pip install datasets
    python prepare.py --from train=FILE test=FILE    # local files, jsonl or parquet

The label is a solution, for people and for the check of reward.py; tests and setup are Python.
Other problems of your own: change SOURCES and convert.
"""

from megatron_rl.recipes.prepare import Row, Source, main


def convert(row: Row) -> Row:
    """The prompt shows the first test, which names the function; the others stay hidden."""
    tests = row["test_list"]
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise ValueError(f"'test_list' must have tests as texts, got {tests!r:.80}")
    for name in ("code", *(f"test_list.{number}" for number in range(len(tests)))):
        text = row["code"] if name == "code" else tests[int(name.partition(".")[2])]
        try:
            compile(text, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{name!r} is not Python: {error}") from error
    return {
        "prompt": f"{row['text'].strip()} Your code should pass this test:\n\n{tests[0]}",
        "label": row["code"],
        "tests": list(tests),
        "setup": row.get("test_setup_code") or "",
    }


def solution(row: Row) -> str:
    """A response that reward.py must accept: the first rows are checked with it."""
    return f"```python\n{row['label']}\n```"


COLUMNS = {"text": str, "code": str, "test_list": list}
REPOSITORY, FILE = "google-research-datasets/mbpp", "full/{}-00000-of-00001.parquet"
SOURCES = {  # name of the set -> where it is on the Hugging Face hub
    "train": Source(REPOSITORY, FILE.format("train"), COLUMNS, convert, num_rows=374),
    "test": Source(REPOSITORY, FILE.format("test"), COLUMNS, convert, num_rows=500),
}

if __name__ == "__main__":
    raise SystemExit(main(SOURCES, solution))
