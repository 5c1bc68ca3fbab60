"""Settings and rendered files, for tests of kinds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import yaml

from tonle.config.load_settings import load_deploy
from tonle.deploy.document import RenderedFile
from tonle.deploy.render import render
from tonle.deploy.workload import Workload

ROOT = Path(__file__).parents[3]


def files_of(kind: str, folder: Path, **settings: Any) -> dict[str, RenderedFile]:
    """By name. `settings`: of the server, and of `deploy`."""
    file = folder / "tonle.yaml"
    file.write_text(yaml.safe_dump(settings))
    return {each.name: each for each in render(kind, Workload.of(*load_deploy({}, file=file)))}


def committed_and_rendered(folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Files of an example in deploy/: as they are in the repository, and as they are rendered now."""
    place = ROOT / "deploy" / folder
    rendered = runpy.run_path(str(ROOT / "deploy" / "render_examples.py"))["rendered"]()
    return (
        {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()},
        {str(path.relative_to(place)): text for path, text in rendered.items() if path.is_relative_to(place)},
    )
