"""Requests and responses of the handle API, under the module path that users know."""

from penstock.serve.replica.handles.models import *  # noqa: F403  (all that it defines)
