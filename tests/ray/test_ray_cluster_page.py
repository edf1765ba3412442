"""docs/ray-cluster.md from its first command to its last, but for ports.

A cluster of its own, for the page starts one. GPUs are only claimed, engines are simulators.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.bucket import s3_server
from tests.pages import ROOT, Page
from tests.ports import unused

pytestmark = [pytest.mark.full, pytest.mark.parity("S1"), pytest.mark.timeout(500)]

KEY = "key-of-the-cluster"
RAY = r"""
ray() {
    case $1 in
        start) stays ray "Ray runtime started" env -u RAY_ADDRESS ray "$@" --block --port "$GCS" \
            --temp-dir "$SHORT" --dashboard-port "$DASHBOARD" --num-cpus 8 --num-gpus 8 \
            --resources '{"accelerator_type:L4": 1}' ;;
        job) until env ray "$@" >job.log 2>&1; do  # Ray starts its agent after the dashboard
            grep -q "No available agent to submit job" job.log || { cat job.log; exit 1; }
            sleep 1
        done ;;
        *) env ray "$@" ;;
    esac
}
answered() {
    until curl -sf 127.0.0.1:8000/health; do sleep 0.3; done
    curl -sf 127.0.0.1:8000/v1/chat/completions -H "authorization: Bearer $PENSTOCK_API_KEY" \
        -d '{"messages": [{"role": "user", "content": "over there"}]}' | grep "over there"
}
"""
PAGE = Page(
    "docs/ray-cluster.md",
    before=RAY,
    after={
        "penstock serve": "answered; ends service",
        "serve deploy": 'answered; serve status | grep "status: RUNNING"',
        "ray job submit": "answered",
    },
    replaced={"--replicas 4": "--replicas 1"},
    limit_s=480,
)


def prompt_tokens(printed: str) -> int:
    """Of the answer."""
    return int(re.findall(r'"prompt_tokens":(\d+)', printed)[-1])


def test_each_step_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith(("RAY_", "PENSTOCK_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "row 1"}\n{"prompt": "row 2"}\n')
    gcs, dashboard = unused(), unused()
    short = tempfile.mkdtemp(prefix="page-")  # Ray's sockets allow no long path
    try:
        with s3_server("bucket") as s3:
            _, guest, deployed, _, job, _ = PAGE.run(
                tmp_path,
                unused(),
                **s3.environment,
                HOME=str(tmp_path),  # for the cluster's token
                PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                PENSTOCK_ENGINE_CLS="tests.standin:simulator",
                PENSTOCK_API_KEY=KEY,
                RAY_USAGE_STATS_ENABLED="0",
                RAY_ADDRESS=f"127.0.0.1:{gcs}",
                RAY_API_SERVER_ADDRESS=f"http://127.0.0.1:{dashboard}",
                RAY_DASHBOARD_ADDRESS=f"http://127.0.0.1:{dashboard}",
                GCS=str(gcs),
                DASHBOARD=str(dashboard),
                SHORT=short,
            )
            lines = s3.client.get_object(Bucket="bucket", Key="answers.jsonl")["Body"].read().decode()
    finally:
        shutil.rmtree(short, ignore_errors=True)
    assert prompt_tokens(guest) == prompt_tokens(deployed) < prompt_tokens(job)  # the job asks for politeness
    for answers in (lines, (tmp_path / "answers.jsonl").read_text()):
        assert [json.loads(line)["generated_text"] for line in answers.splitlines()] == ["row 1", "row 2"]
