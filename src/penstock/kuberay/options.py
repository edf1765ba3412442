"""What a manifest says that no config does: the site's names, images, labels and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.options import option

GPU_IMAGE, CPU_IMAGE = "penstock:gpu", "penstock:cpu"
"""Names that the Dockerfiles' own first lines build."""

LONGEST_NAME = 47
"""KubeRay's limit: it adds a suffix to the names of clusters that it makes for a RayService."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?([KMGTP]i?)?")
_ADDRESS = re.compile(r"([\w-]+(\.[\w-]+)*|\[[0-9a-fA-F:]+\]):[1-9][0-9]{0,4}")
_SELECTOR = re.compile(r"(?:([\w-]+):)?([\w./-]+)=([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Site:
    """What the user wrote. redis: of the store that keeps the cluster's state while its head is replaced.

    Sizes as Kubernetes writes them.
    """

    name: str = option("Name of the RayService.", "penstock")
    image: str | None = option(
        "Image of all pods, as the Dockerfiles build it.", show_default="penstock:gpu or penstock:cpu"
    )
    accelerator: Literal["auto", "cpu", "gpu"] | None = option(
        "`cpu` runs every model on CPU.", show_default="by each config, else gpu", case_sensitive=False
    )
    gpus_per_node: int = option("GPUs of one node.", 8, min=1)
    node_selector: list[str] | None = option(
        "Label of the nodes that have GPUs, of a type or of any.", metavar="[TYPE:]KEY=VALUE"
    )
    memory: str | None = option("Memory of each worker pod.", show_default="8Gi, and 24Gi for each GPU")
    storage: str = option("Size of the volume for models and jobs; `none` keeps them in each pod.", "200Gi")
    storage_class: str | None = option("Storage class of the volume; several nodes must be able to mount it.")
    redis: str | None = option(
        "Redis that keeps the cluster's state: engines go on while the head is replaced. Its password is "
        "REDIS_PASSWORD in the Secret.",
        metavar="HOST:PORT",
    )
    ray_version: str | None = option("Ray in the image.", show_default="as installed here")

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        if not _NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise ConfigError(
                f"--name {self.name!r} must be at most {LONGEST_NAME} lower-case letters, digits and dashes, "
                "with a letter first."
            )
        for flag, size in (("--memory", self.memory), ("--storage", self.volume)):
            if size is not None and not _QUANTITY.fullmatch(size):
                raise ConfigError(f"{flag} {size!r} must be a size such as 64Gi.")
        if self.volume is None and self.storage_class is not None:
            raise ConfigError("--storage-class has no effect with --storage none; leave one of them out.")
        if self.redis is not None and not _ADDRESS.fullmatch(self.redis):
            raise ConfigError(f"--redis {self.redis!r} must be HOST:PORT, such as redis.default:6379.")
        for text in self.node_selector or ():
            if not _SELECTOR.fullmatch(text):
                raise ConfigError(
                    f"--node-selector {text!r} must be KEY=VALUE or TYPE:KEY=VALUE, for example "
                    "L4:cloud.google.com/gke-accelerator=nvidia-l4."
                )

    @property
    def volume(self) -> str | None:
        """Size of the volume that all pods share; None for a folder of each pod's own."""
        return None if self.storage == "none" else self.storage

    @property
    def secret(self) -> str:
        """Name of the Secret that holds keys and tokens."""
        return f"{self.name}-secrets"

    def labels(self, accelerator_type: str | None) -> dict[str, str]:
        """Labels of the nodes for a pod with GPUs of this type."""
        return {key: value for type, key, value in self._selectors() if type in (None, accelerator_type)}

    def refuse_unused(self, types: Iterable[str | None]) -> None:
        """Raises: ConfigError for a selector of a type that no model asks for."""
        known = {type for type in types if type}
        for named, _, _ in self._selectors():
            if named is not None and named not in known:
                has = f"they ask for {', '.join(sorted(known))}" if known else "they name no accelerator_type"
                raise ConfigError(f"--node-selector names GPUs of type {named}, but no model does; {has}.")

    def _selectors(self) -> list[tuple[str | Any, ...]]:
        """Of each selector its type, None for all nodes with GPUs, and the label's name and value."""
        return [found.groups() for text in self.node_selector or () if (found := _SELECTOR.fullmatch(text))]
