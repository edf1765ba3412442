"""What a manifest says that no config does: the site's names, images, labels and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ConfigError

GPU_IMAGE, CPU_IMAGE = "penstock:gpu", "penstock:cpu"
"""Names that the Dockerfiles' own first lines build."""

GPUS_PER_NODE = 8
LONGEST_NAME = 47
"""KubeRay's limit: it adds a suffix to the names of clusters that it makes for a RayService."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?([KMGTP]i?)?")
_ADDRESS = re.compile(r"([\w-]+(\.[\w-]+)*|\[[0-9a-fA-F:]+\]):[1-9][0-9]{0,4}")
_SELECTOR = re.compile(r"(?:(?P<type>[\w-]+):)?(?P<key>[\w./-]+)=(?P<value>[\w.-]+)")


@dataclass(frozen=True, slots=True)
class NodeSelector:
    """A label of the nodes that have GPUs of a type, or of all nodes with GPUs where `type` is None."""

    key: str
    value: str
    type: str | None = None

    @classmethod
    def parse(cls, text: str) -> NodeSelector:
        """`L4:cloud.google.com/gke-accelerator=nvidia-l4`. Raises: ConfigError."""
        if (found := _SELECTOR.fullmatch(text)) is None:
            raise ConfigError(
                f"--node-selector {text!r} must be KEY=VALUE or TYPE:KEY=VALUE, for example "
                "L4:cloud.google.com/gke-accelerator=nvidia-l4."
            )
        return cls(found["key"], found["value"], found["type"])


@dataclass(frozen=True, slots=True)
class Site:
    """memory: of each worker pod; None to go by its GPUs. storage: of the volume that all pods share; None
    for a folder of each pod's own. Sizes as Kubernetes writes them. accelerator: "auto", "cpu" or "gpu".
    redis: address of the store that keeps the cluster's state while its head is replaced.
    """

    name: str = "penstock"
    image: str | None = None
    accelerator: str = "auto"
    gpus_per_node: int = GPUS_PER_NODE
    selectors: tuple[NodeSelector, ...] = ()
    memory: str | None = None
    storage: str | None = "200Gi"
    storage_class: str | None = None
    ray_version: str = ""
    redis: str | None = None

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        if not _NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise ConfigError(
                f"--name {self.name!r} must be at most {LONGEST_NAME} lower-case letters, digits and dashes, "
                "with a letter first."
            )
        for option, size in (("--memory", self.memory), ("--storage", self.storage)):
            if size is not None and not _QUANTITY.fullmatch(size):
                raise ConfigError(f"{option} {size!r} must be a size such as 64Gi.")
        if self.storage is None and self.storage_class is not None:
            raise ConfigError("--storage-class has no effect with --storage none; leave one of them out.")

        if self.redis is not None and not _ADDRESS.fullmatch(self.redis):
            raise ConfigError(f"--redis {self.redis!r} must be HOST:PORT, such as redis.default:6379.")

    @property
    def secret(self) -> str:
        """Name of the Secret that holds keys and tokens."""
        return f"{self.name}-secrets"

    def node_selector(self, accelerator_type: str | None) -> dict[str, str]:
        """Labels of the nodes for a pod with GPUs of this type."""
        return {each.key: each.value for each in self.selectors if each.type in (None, accelerator_type)}

    def refuse_unused(self, types: Iterable[str | None]) -> None:
        """Raises: ConfigError for a selector of a type that no model asks for."""
        known = {type for type in types if type}
        for each in self.selectors:
            if each.type is not None and each.type not in known:
                has = f"they ask for {', '.join(sorted(known))}" if known else "they name no accelerator_type"
                raise ConfigError(
                    f"--node-selector names GPUs of type {each.type}, but no model does; {has}."
                )
