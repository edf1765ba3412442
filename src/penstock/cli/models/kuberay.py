"""`penstock kuberay`: the manifest for Kubernetes, on stdout; what to do before it is applied, on stderr."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version
from typing import Annotated, Literal

import typer

from penstock.cli.models.options import Arguments

_NONE = "none"


def kuberay(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG.yaml...", help="Files of models.")],
    name: Annotated[str, typer.Option(help="Name of the RayService.")] = "penstock",
    image: Annotated[
        str | None,
        typer.Option(
            help="Image of all pods, as the Dockerfiles build it.",
            show_default="penstock:gpu or penstock:cpu",
        ),
    ] = None,
    accelerator: Annotated[
        Literal["auto", "cpu", "gpu"] | None,
        typer.Option(
            help="`cpu` runs every model on CPU.",
            show_default="by each config, else gpu",
            case_sensitive=False,
        ),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node.", min=1)] = 8,
    node_selector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TYPE:]KEY=VALUE", help="Label of the nodes that have GPUs, of a type or of any."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each worker pod.", show_default="8Gi, and 24Gi for each GPU"),
    ] = None,
    storage: Annotated[
        str,
        typer.Option(help="Size of the volume for models and jobs; `none` keeps them in each pod."),
    ] = "200Gi",
    storage_class: Annotated[
        str | None,
        typer.Option(help="Storage class of the volume; several nodes must be able to mount it."),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Redis that keeps the cluster's state: engines go on while the head is replaced. Its "
            "password is REDIS_PASSWORD in the Secret.",
        ),
    ] = None,
    ray_version: Annotated[
        str | None, typer.Option(help="Ray in the image.", show_default="as installed here")
    ] = None,
) -> None:
    """Write the Kubernetes manifest of a service: a RayService for KubeRay, its volume, its
    disruption budget.

    Starts neither Ray nor a model, and asks no cluster. Keys and tokens come from the Secret `NAME-secrets`.

    - `penstock kuberay models.yaml > rayservice.yaml`
    - `penstock kuberay models.yaml --image registry.example/penstock:gpu --storage-class shared`
    - `penstock kuberay models.yaml --node-selector L4:cloud.google.com/gke-accelerator=nvidia-l4`
    """
    from penstock.cli.models.faults import faults
    from penstock.cli.models.plan import make_plan
    from penstock.config import Settings
    from penstock.config.messages.problems import config_error
    from penstock.config.schema.env_vars import references_kept
    from penstock.kuberay.manifest import manifest, notes
    from penstock.kuberay.options import NodeSelector, Site

    if accelerator is not None:
        os.environ["PENSTOCK_ACCELERATOR"] = accelerator

    site = Site(
        name=name,
        image=image,
        accelerator=Settings.read().accelerator,
        gpus_per_node=gpus_per_node,
        selectors=tuple(map(NodeSelector.parse, node_selector or ())),
        memory=memory,
        storage=None if storage == _NONE else storage,
        storage_class=storage_class,
        ray_version=ray_version or version("ray"),
        redis=redis,
    )
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
