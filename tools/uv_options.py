"""Print the options with which uv installs as pip is configured here, one a line; tools/install.sh
uses them.

uv does not read pip's configuration (pip.conf, PIP_...).  A line NAME=VALUE is a variable for uv's
environment.  Exits with 1, naming the setting, where pip is configured in a way that uv
does not get here: then pip must install.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
"""Setting of pip -> option of uv, once for each value."""
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
WITHOUT_EFFECT = {
    "break-system-packages", "cache-dir", "disable-pip-version-check", "no-color", "no-input",
    "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "verbose",
}  # fmt: skip
"""Settings of pip that do not change which packages are installed."""
SCOPES = ("global", "install", ":env:")
"""From the weakest to the strongest."""


class UnknownSettingError(ValueError):
    """A setting of pip that may change what is installed, and that uv does not get."""


def settings(listed: str) -> dict[str, str]:
    """Return the settings in the output of `pip config list`, the strongest of each."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, separator, value = line.partition("=")
        scope, _, key = name.rpartition(".")
        if separator and scope in SCOPES:
            strength = SCOPES.index(scope)
            if key not in found or found[key][0] <= strength:
                found[key] = strength, str(ast.literal_eval(value))
    return {key: value for key, (_, value) in found.items()}


def uv_options(pip: dict[str, str]) -> Iterator[str]:
    """Yield the options.  Raises UnknownSettingError for a setting that none stands for."""
    for key, value in pip.items():
        if key in OPTIONS:
            yield from (f"{OPTIONS[key]}={part}" for part in value.split())
        elif key in VARIABLES:
            yield f"{VARIABLES[key]}={value}"
        elif key == "no-index":
            if value.lower() in ("1", "true", "yes", "on"):
                yield "--no-index"
        elif key not in WITHOUT_EFFECT:
            raise UnknownSettingError(f"pip is configured with {key} = {value!r}")
    # as pip: the best version of all indexes, not that of the first one that has the package
    yield "--index-strategy=unsafe-best-match"


def main() -> int:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    try:
        print("\n".join(uv_options(settings(listed))))
    except (UnknownSettingError, ValueError, SyntaxError) as error:
        print(f"uv_options: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
