"""Routers, under the module path of `ray.serve.llm`.

`deployment_config.request_router_config` names them. The gateway's policies are in `penstock.serve.routing`.
"""

from __future__ import annotations

from typing import NoReturn

from penstock.serve.fleet.membership import FleetRouter

__all__ = ["PrefixCacheAffinityRouter"]

_KV_AWARE = (
    "penstock.serve has no KVAwareRouter: the default, `routing_policy: prefix_affinity`, weighs what each "
    "replica has cached against the work that waits there. Leave request_router_class out."
)


class PrefixCacheAffinityRouter(FleetRouter):
    """Stands for `routing_policy: prefix_affinity`, by which the gateway picks; `request_router_kwargs` are
    those of `PrefixRouterOptions`. For calls by handle, the less busy of two replicas.
    """


def __getattr__(name: str) -> NoReturn:
    if name == "KVAwareRouter":
        raise ImportError(_KV_AWARE)
    raise AttributeError(f"module 'penstock.serve.request_router' has no attribute '{name}'")
