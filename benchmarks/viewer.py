"""The viewer on large runs: the first indexing, the first page, filters, sorting, search, far
pages.

    python -m benchmarks.viewer [--rollouts 100000 1000000] [--characters 400]

Made-up runs without tensors (tests/viewer_run.py); the server's own code, called as it calls
itself, JSON included.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from fastapi.testclient import TestClient

from megatron_rl_viewer.app import create_app
from megatron_rl_viewer.run_folder import Runs
from tests.viewer_run import write_many

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--characters", type=int, default=400, help="of a response")
    parser.add_argument(
        "--folder", type=Path, help="of the made-up runs (default: a temporary one)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for rollouts in arguments.rollouts:
            measure(Path(folder), rollouts, arguments.characters)


def measure(folder: Path, rollouts: int, characters: int) -> None:
    run = write_many(folder / f"run_{rollouts}", rollouts, characters=characters)
    size = sum(path.stat().st_size for path in run.iterdir())
    runs = Runs([run], folder / "cache")
    start, cpu = time.perf_counter(), time.process_time()
    runs.runs[0].update()
    indexed, cpu = time.perf_counter() - start, time.process_time() - cpu
    database = runs.runs[0].index.path.stat().st_size
    print(f"{rollouts} rollouts of {characters} characters, {size / 1e6:.0f} MB")
    print(
        f"  {'first indexing':34} {indexed:9.1f} s ({cpu:.1f} s of CPU), index"
        f" {database / 1e6:.0f} MB"
    )
    start = time.perf_counter()
    again = Runs([run], folder / "cache")
    again.runs[0].update()
    print(f"  {'opened again':34} {(time.perf_counter() - start) * 1e3:9.0f} ms")
    client = TestClient(create_app(again, "token", follow=False))
    client.get("/api/runs?token=token")
    half = json.dumps([{"column": "reward", "op": ">=", "value": 0.5}])
    few = json.dumps(
        [
            {"column": "reward", "op": ">=", "value": 0.999},
            {"column": "length", "op": "<", "value": 4000},
        ]
    )
    table = "/api/runs/0/rollouts"
    requests = {
        "runs": "/api/runs",
        "first page": table,
        "sorted by reward": f"{table}?sort=reward&order=asc",
        "sorted by KL, page in the middle": f"{table}?sort=kl&offset={rollouts // 2}",
        "last page": f"{table}?offset={rollouts - 100}",
        "filter, half of them": f"{table}?filter={half}",
        "filter, half, sorted by length": f"{table}?filter={half}&sort=length",
        "filter, few": f"{table}?filter={few}",
        "search, all of them": f"{table}?q=carry",
        "search, one": f"{table}?q={rollouts // 2 % 512}%20carry&filter={few}",
        "groups": "/api/runs/0/groups?sort=reward_mean",
        "prompts of a run": "/api/prompts?run=0",
        "metrics": "/api/runs/0/metrics",
    }
    for name, path in requests.items():
        times, cpu = [], time.process_time()
        for _ in range(REPEATS):
            start = time.perf_counter()
            assert client.get(path).status_code == 200
            times.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / REPEATS
        print(
            f"  {name:34} {statistics.median(times) * 1e3:9.0f} ms (first {times[0] * 1e3:.0f}; CPU"
            f" {cpu * 1e3:.0f})"
        )


if __name__ == "__main__":
    main()
