"""What setup.cfg cannot say: the README as a package index can show it.

There a relative link leads nowhere. Where the repository's address is known, as it is
on GitHub Actions, figures and links get it. Elsewhere a figure becomes its caption, and
of a link its text and the file's name stay.
"""

from __future__ import annotations

import os
import pathlib
import re

import setuptools

README = pathlib.Path(__file__).with_name("README.md")
CODE = re.compile(r"(^```.*?^```)", re.M | re.S)
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def repository() -> str | None:
    """Where the sources are, as far as the one who builds them says so."""
    parts = [os.environ.get(f"GITHUB_{part}") for part in ("SERVER_URL", "REPOSITORY")]
    return "/".join(filter(None, parts)) if all(parts) else None


def description(text: str, address: str | None, commit: str = "HEAD") -> str:
    """A README without relative figures and links; code stays as it is."""

    def image(found: re.Match[str]) -> str:
        caption, path = found.groups()
        if address:
            return f"![{caption}]({address}/raw/{commit}/{path})"
        return f"*(Figure in the repository: {caption}.)*"

    def link(found: re.Match[str]) -> str:
        words, path = found.groups()
        if address:
            return f"[{words}]({address}/blob/{commit}/{path})"
        file = path.partition("#")[0]
        return words if words.strip("`") == file else f"{words} (`{file}`)"

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(link, IMAGE.sub(image, part)) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    source = repository()
    setuptools.setup(
        long_description=description(
            README.read_text(encoding="utf-8"),
            source,
            os.environ.get("GITHUB_SHA", "HEAD"),
        ),
        long_description_content_type="text/markdown",
        project_urls={"Source": source} if source else {},
    )
