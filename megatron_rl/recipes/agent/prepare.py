"""Writes data/train.jsonl and data/test.jsonl, with rows {"id", "prompt", "label"}.

    python prepare.py                                # downloads; needs: pip install datasets
    python prepare.py --from train=FILE test=FILE    # local files, jsonl or parquet

Other problems of your own: change SOURCES and convert.
"""

from decimal import Decimal, InvalidOperation

from megatron_rl.recipes.prepare import Row, Source, main


def convert(row: Row) -> Row:
    """The label is what follows "####" in GSM8K's solutions, 2500 for "2,500"."""
    _, marked, label = row["answer"].rpartition("####")
    if not marked:
        raise ValueError(f"'answer' must end with #### and the answer, got {row['answer'][-40:]!r}")
    label = label.strip().replace(",", "")
    try:
        Decimal(label)
    except InvalidOperation:
        raise ValueError(f"the answer must be a number, got {label[:40]!r}") from None
    return {"prompt": row["question"], "label": label}


def solution(row: Row) -> str:
    """An answer that reward.py must accept: the first rows are checked with it."""
    return f"The answer is {row['label']}."


COLUMNS = {"question": str, "answer": str}
SOURCES = {  # name of the set -> where it is on the Hugging Face hub
    "train": Source(
        "openai/gsm8k", "main/train-00000-of-00001.parquet", COLUMNS, convert, num_rows=7473
    ),
    "test": Source(
        "openai/gsm8k", "main/test-00000-of-00001.parquet", COLUMNS, convert, num_rows=1319
    ),
}

if __name__ == "__main__":
    raise SystemExit(main(SOURCES, solution))
