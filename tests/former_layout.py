"""A run's folder as versions up to 0.3 wrote it: rollouts.jsonl, rollouts_000001.safetensors, ...

The names are written out here, not taken from the package: folders of users have them.
"""

import json
import re
from pathlib import Path

STEP_FILE = re.compile(r"step_(\d{6})((?:\.dp\d+)?)\.(jsonl|safetensors)")


def to_former_layout(folder: Path) -> Path:
    """Move a run's step files to their former names and return `folder`.

    Lines are appended to those that are there, as by a run that was resumed.
    """
    for half in ("rollouts", "trained"):
        for path in sorted((folder / half).glob("step_*")):
            step, replica, kind = STEP_FILE.fullmatch(path.name).groups()
            if kind == "safetensors":
                path.rename(folder / f"{half}{replica}_{step}.safetensors")
                continue
            text = re.sub(r"trained/step_(\d+)((?:\.dp\d+)?)\.", r"trained\2_\1.", path.read_text())
            with open(folder / f"{half}{replica}.jsonl", "a") as lines:
                lines.write(text)
            path.unlink()
        if (folder / half).is_dir():
            (folder / half).rmdir()
    return folder


FORMER = re.compile(r"(rollouts|trained)((?:\.dp\d+)?)_(\d{6})\.safetensors")


def to_present_layout(folder: Path) -> Path:
    """Move the loose files of a run to rollouts/ and trained/ and return `folder`."""
    for half in ("rollouts", "trained"):
        (folder / half).mkdir(exist_ok=True)
        for path in sorted(folder.glob(f"{half}*.jsonl")):
            replica = path.stem.removeprefix(half)
            for row in map(json.loads, path.read_text().splitlines()):
                if match := FORMER.fullmatch(row.get("tensors") or ""):
                    row["tensors"] = f"{half}/step_{match[3]}{match[2]}.safetensors"
                target = folder / half / f"step_{row['step']:06d}{replica}.jsonl"
                with open(target, "a") as lines:
                    lines.write(json.dumps(row) + "\n")
            path.unlink()
        for path in sorted(folder.glob(f"{half}*.safetensors")):
            match = FORMER.fullmatch(path.name)
            path.rename(folder / half / f"step_{match[3]}{match[2]}.safetensors")
    return folder
