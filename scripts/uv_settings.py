"""Translate `pip config list` (standard input) into environment variables of uv, one a line.

uv reads no configuration of pip's: without this it would not find the mirror of a network without internet. Ends with 1
where pip has a setting that has no equivalent here.
"""

from __future__ import annotations

import ast
import sys

#: The variable of uv with the meaning of pip's setting.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "require-hashes": "UV_REQUIRE_HASHES",
}
#: Settings that change nothing of what is installed.
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}
#: The sections that hold for `pip install`, each before those that it overrides.
SECTIONS = (":env:", "install", "global")


def main() -> int:
    settings: dict[str, dict[str, str]] = {}
    for line in sys.stdin:
        key, _, value = line.strip().partition("=")
        section, _, name = key.partition(".")
        if section in SECTIONS and name not in WITHOUT_EFFECT:
            settings.setdefault(name, {})[section] = str(ast.literal_eval(value))
    if settings.keys() - VARIABLES.keys():
        return 1
    for name, by_section in settings.items():
        value = next(by_section[section] for section in SECTIONS if section in by_section)
        separator = "," if name == "find-links" else " "
        print(f"{VARIABLES[name]}={separator.join(value.split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
