"""Renders the examples in this folder again, from the settings in `examples/`: `make examples`.

Does: write every file of `EXAMPLES`. Does not: remove files that are no longer rendered; tests/unit/deploy finds those.
"""

from __future__ import annotations

from pathlib import Path

from tonle.config.load_settings import load_deploy
from tonle.deploy.alert_rules import alert_rules
from tonle.deploy.dashboard import dashboard
from tonle.deploy.document import RenderedFile, json_file
from tonle.deploy.render import render
from tonle.deploy.workload import Workload

HERE = Path(__file__).parent
EXAMPLES = (  # folder, kind, settings
    ("kubernetes", "kubernetes", "default"),
    ("keda", "keda", "default"),
    ("llm-d", "llm-d", "default"),
    ("kserve", "kserve", "lean-rag"),
    ("kserve", "llm-d", "lean-rag-disaggregated"),
    ("llmisvc", "llmisvc", "lean-rag-disaggregated"),
    ("compose", "compose", "default"),
    ("runpod", "runpod", "runpod"),
    ("systemd", "systemd", "default"),
)
ALERTS = """\
Rules for Prometheus: rule_files in prometheus.yml. The groups are also the spec of a PrometheusRule (README.md here).
Limits such as "> 2" seconds are examples: set them to what your users expect.
"""


def rendered() -> dict[Path, str]:
    """The text of each file, by its path."""
    files = {}
    for folder, kind, settings in EXAMPLES:
        workload = Workload.of(*load_deploy({}, file=HERE / "examples" / f"{settings}.yaml"))
        files |= {HERE / folder / file.name: file.text for file in render(kind, workload)}
    board = json_file("tonle.json", dashboard())
    alerts = RenderedFile("alerts.yaml", [alert_rules()], ALERTS)
    return files | {HERE / "grafana" / file.name: file.text for file in (board, alerts)}


if __name__ == "__main__":
    for path, text in rendered().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
