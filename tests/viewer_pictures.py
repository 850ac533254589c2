"""Pictures of the viewer's pages for the docs, at most 150 kB each.

python -m tests.viewer_pictures runs/demo docs/assets       # or make viewer-screenshots
"""

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from tests.browser import TOKEN, open_browser, serve_runs, why_no_browser

MAX_BYTES = 150_000
SIZE = {"width": 1280, "height": 800}
COLORS = 128  # of a PNG with a palette
FLIPPED = (
    '[{"column": "flip_frac", "op": ">", "value": 0}, {"column": "has_tensors", "op": "=",'
    ' "value": 1}]'
)
"""The picture of one rollout is of the longest response with a flip."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if reason := why_no_browser():
        print(f"viewer_pictures: {reason}", file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as cache,
        serve_runs([arguments.run], Path(cache)) as address,
        open_browser() as browser,
    ):
        take(browser, address, arguments.folder)
    return 0


def take(browser, address: str, folder: Path) -> None:
    """viewer_run, viewer_rollouts, viewer_rollout (light) and viewer_experts (dark)."""
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{address}/?token={TOKEN}")
    key = longest_with_flips(page, address)
    shots = {
        "run": ("#/run/0", ".chart canvas", "light"),
        "rollouts": ("#/run/0/rollouts?sort=max_log_ratio", ".tbody a", "light"),
        "rollout": (f"#/run/0/rollout/{key}?color=log_ratio", ".model .t", "light"),
        "experts": ("#/run/0/experts?map=server", ".heat canvas", "dark"),
    }
    for name, (link, part, mode) in shots.items():
        page.emulate_media(color_scheme=mode)
        page.goto(f"{address}/{link}")
        page.locator(part).first.wait_for()
        if name == "rollout":
            page.keyboard.press("n")  # the first flipped token
        page.wait_for_timeout(500)
        save(page.screenshot(), folder / f"viewer_{name}.png")


def longest_with_flips(page, address: str) -> str:
    """Key of a rollout; waits for the index.  RuntimeError where the run has none."""
    link = f"{address}/api/runs/0/rollouts?limit=1&sort=length&filter={quote(FLIPPED)}"
    for _ in range(60):
        answer = page.request.get(link).json()
        if answer["rows"] and answer["indexing"] is None:
            return answer["rows"][0]["key"]
        time.sleep(0.5)
    raise RuntimeError(
        "no rollout of this run has tensors and a flip: rollout.save_tensors = true saves them"
    )


def save(png: bytes, path: Path) -> None:
    """With a palette: a third of the bytes."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    if size > MAX_BYTES:
        raise RuntimeError(f"{path}: {size} bytes, more than {MAX_BYTES}")


if __name__ == "__main__":
    sys.exit(main())
