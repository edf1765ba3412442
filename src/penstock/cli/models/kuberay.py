"""`penstock kuberay`: the manifest for Kubernetes, on stdout; what to do before it is applied, on stderr."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from penstock.cli.models.options import Arguments
from penstock.kuberay.options import Site


def kuberay(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG.yaml...", help="Files of models.")],
    site: Site,
) -> None:
    """Write the Kubernetes manifest of a service: a RayService for KubeRay, its volume, its
    disruption budget, and a ConfigMap of the models, which the service follows.

    Starts neither Ray nor a model, and asks no cluster. Keys and tokens come from the Secret `NAME-secrets`.

    - `penstock kuberay models.yaml > rayservice.yaml`
    - `penstock kuberay models.yaml --image registry.example/penstock:gpu --storage-class shared`
    - `penstock kuberay models.yaml --node-selector L4:cloud.google.com/gke-accelerator=nvidia-l4`
    """
    from penstock.cli.models.faults import faults
    from penstock.cli.models.plan import make_plan
    from penstock.config.messages.problems import config_error
    from penstock.config.schema.env_vars import references_kept
    from penstock.kuberay.manifest import manifest, notes

    if site.accelerator is not None:
        os.environ["PENSTOCK_ACCELERATOR"] = site.accelerator
    with references_kept():
        _, problems, notices = faults(configs)
        if problems:
            raise config_error(dict.fromkeys(problems))
        plan = make_plan(Arguments(sources=tuple(configs)))
        plan.refuse_serve_only()
    print(f"# penstock {shlex.join(sys.argv[1:])}")
    print(manifest(plan.serving, site), end="")
    for text in [*notices, *notes(plan.serving, site)]:
        print(text, file=sys.stderr)
