"""Takes pages and pictures into the site from where they are: included, not copied."""

from __future__ import annotations

import pathlib
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    "results.md": "examples/RESULTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def on_files(files: Files, config: Any) -> Files:
    outside = {uri: ROOT / path for uri, path in PAGES.items()}
    for folder in ("examples", "benchmarks"):
        for picture in sorted((ROOT / folder / "results").glob("*.png")):
            outside[f"results/{picture.name}"] = picture
    for uri, path in outside.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files
